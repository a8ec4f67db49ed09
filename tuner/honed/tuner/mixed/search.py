"""Finds what is to be kept in float32, from errors alone: the most sensitive first, in few trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from honed.tuner.halves import Exemptions

Error = Callable[[Exemptions], float]
# A group of operators that alone errs by less of the bound than this is not looked at more closely.
_NEGLIGIBLE = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOperators:
    """What is kept, and the error then."""

    keep: Exemptions
    error: float


class PrecisionTrials:
    """Errors of what was tried, each once, up to a number of trials."""

    def __init__(self, error: Error, most: int) -> None:
        self._error = error
        self.left = most
        self._known: dict[Exemptions, float] = {}

    def __call__(self, keep: Exemptions) -> float:
        """The error; a trial more where it is not known."""
        if keep not in self._known:
            self.left -= 1
            self._known[keep] = self._error(keep)
        return self._known[keep]


def search(
    operators: Sequence[str],
    products: Sequence[str],
    usual: frozenset[str],
    trials: PrecisionTrials,
    bound: float,
) -> KeptOperators | None:
    """The least that has to be kept in float32 for an error within the bound; None: everything.

    `usual` is kept in any case. First operators are kept, with all products added up in float32; then
    products are added up in fp16 where the error allows.
    """
    plain = Exemptions(single=usual)
    if trials(plain) <= bound:
        return KeptOperators(keep=plain, error=trials(plain))
    single = usual
    most = Exemptions(single=usual, wide=frozenset(products) - usual)
    if trials(most) > bound:
        others = [name for name in operators if name not in usual]
        single = usual | _least(
            others,
            lambda kept: trials(Exemptions(single=usual | kept, wide=frozenset(products) - usual - kept)),
            bound,
            lambda: trials.left // 2,
        )
        if single.issuperset(operators):
            return None
    wide = _least(
        [name for name in products if name not in single],
        lambda kept: trials(Exemptions(single=single, wide=kept)),
        bound,
        lambda: trials.left,
    )
    keep = Exemptions(single=single, wide=wide)
    return KeptOperators(keep=keep, error=trials(keep))


@dataclass(frozen=True, slots=True)
class _NodeGroup:
    """Neighbours, and the error where they alone are not kept."""

    units: tuple[str, ...]
    alone: float


def _least(
    units: Sequence[str],
    error: Callable[[frozenset[str]], float],
    bound: float,
    left: Callable[[], int],
) -> frozenset[str]:
    """Units to keep for an error within the bound, the most sensitive first; keeping all is known to do.

    Groups of units are halved, the one that errs most first, as long as there are trials left.
    """
    if not units:
        return frozenset()
    whole = frozenset(units)
    groups = [_NodeGroup(tuple(units), float("inf"))]
    while left() >= 2 + (len(groups) + 1).bit_length():
        coarse = max((g for g in groups if len(g.units) > 1), key=lambda g: g.alone, default=None)
        if coarse is None or coarse.alone <= bound * _NEGLIGIBLE:
            break
        at, middle = groups.index(coarse), len(coarse.units) // 2
        parts = (coarse.units[:middle], coarse.units[middle:])
        groups[at : at + 1] = [_NodeGroup(part, error(whole - frozenset(part))) for part in parts]
    ranked = sorted(groups, key=lambda g: -g.alone)
    return _fewest([frozenset(g.units) for g in ranked], error, bound, left)


def _fewest(
    ranked: Sequence[frozenset[str]],
    error: Callable[[frozenset[str]], float],
    bound: float,
    left: Callable[[], int],
) -> frozenset[str]:
    """The union of the first few sets, as few as do."""
    fewest, enough = 0, len(ranked)
    while fewest < enough and left() > 0:
        middle = (fewest + enough) // 2
        if error(frozenset().union(*ranked[:middle])) <= bound:
            enough = middle
        else:
            fewest = middle + 1
    return frozenset().union(*ranked[:enough])
