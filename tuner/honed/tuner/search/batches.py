"""Which schedules a task's next batch holds: those of kin, tables, then evolution and descent by turns.

Kin are functions of the same kind at other sizes, in this model or in others: what was best for one is tried
first for the other. Descent is by coordinates, in schedules that differ from the best in a single decision:
TVM has the like as Droplet search; here neighbours go through the same checks and measurements as all else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations

from honed.runtime.origin import Way

from .decisions import Choice, Decision, Drawn, Tile, adapt, divisors, read
from .evolve import Evolution, Proposal
from .starts import starts

EVOLVED_FIRST = 2  # batches of evolution before the best are worth descending from
_CENTRES = 4  # of the best, each descended from when all beside the better ones was tried


@dataclass(frozen=True, slots=True)
class Batch:
    """Proposals, the most promising first."""

    way: Way
    proposals: list[Proposal]
    last: bool  # evolved because nothing beside the best is left to try


class Batches:
    """The batches of one task, in turn. Not for several threads."""

    def __init__(self, evolution: Evolution, size: int, kin: Sequence[str] = ()) -> None:
        """`size` is how many schedules a batch holds at most; `kin` are traces of other tasks' best."""
        self._evolution = evolution
        self._size = size
        self._kin = list(kin)
        self._started = False
        self._evolved = 0
        self._best: list[tuple[float, str]] = []  # seconds and traces, the fastest first
        self._last: Way | None = None
        self._before = math.inf  # the best time when the last batch was proposed

    def know(self, trace: str, seconds: float) -> None:
        """Tell of a measured schedule; infinite seconds: it was refused. Raises as `Evolution.know`."""
        self._evolution.know(trace, seconds)
        if math.isfinite(seconds):
            self._best = sorted({*self._best, (seconds, trace)})[:_CENTRES]

    def next(self) -> Batch:
        """The next batch; one without proposals where nothing new was found."""
        fastest = self._best[0][0] if self._best else math.inf
        won, self._before = fastest < self._before, fastest
        if self._kin:
            kin, self._kin = self._kin, []
            if found := self._of_kin(kin):
                return self._batch(Way.KIN, found)
        if not self._started:
            self._started = True
            if found := self._of_tables():
                return self._batch(Way.TABLES, found)
        beside = self._beside() if self._evolved >= EVOLVED_FIRST else []
        if beside and (self._last is not Way.DESCENT or won):
            return self._batch(Way.DESCENT, beside)
        last = self._evolved >= EVOLVED_FIRST and not beside
        for left in beside:
            self._evolution.forget(left)
        self._evolved += 1
        return self._batch(Way.EVOLUTION, self._evolution.propose(), last=last)

    def _batch(self, way: Way, found: list[Proposal], *, last: bool = False) -> Batch:
        self._last = way
        ranked = sorted(found, key=lambda proposal: -(proposal.score or 0.0))
        for left in ranked[self._size :]:
            self._evolution.forget(left)
        return Batch(way, ranked[: self._size], last)

    def _of_kin(self, kin: Sequence[str]) -> list[Proposal]:
        theirs = []
        for trace in kin:
            with suppress(ValueError):
                theirs.append(read(trace))
        return self._evolution.make(adapted(theirs, self._sketches(), self._size))

    def _of_tables(self) -> list[Proposal]:
        return self._evolution.make(starts(self._sketches()))

    def _sketches(self) -> list[Drawn]:
        return [read(text) for text in self._evolution.sketches]

    def _beside(self) -> list[Proposal]:
        found: list[Proposal] = []
        for _, trace in self._best:
            found += self._evolution.make(neighbours(read(trace)))
            if len(found) >= self._size:
                break
        return found


def distance(kin: Drawn, to: Drawn) -> float:
    """How far the extents of two schedules of one form are apart: the sum of their ratios' logarithms."""
    pairs = zip(kin.tiles, to.tiles, strict=True)
    return sum(abs(math.log(theirs.extent / ours.extent)) for (_, theirs), (_, ours) in pairs)


def adapted(kin: Iterable[Drawn], sketches: Sequence[Drawn], most: int) -> list[Drawn]:
    """Up to `most` schedules made of those of kin, on each sketch of its form, the nearest kin first."""
    found = [
        (distance(one, sketch), made)
        for one in kin
        for sketch in sketches
        if (made := adapt(one, sketch)) is not None
    ]
    found.sort(key=lambda pair: pair[0])
    return list({made.text(): made for _, made in found}.values())[:most]


def neighbours(drawn: Drawn) -> list[Drawn]:
    """All schedules one step away in one decision: tiles at adjacent divisors, choices beside theirs."""
    return [
        drawn.with_decisions({place: other})
        for place, decision in sorted(drawn.decisions.items())
        for other in _beside(decision)
    ]


def _beside(decision: Decision) -> Iterator[Decision]:
    if isinstance(decision, Choice):
        for index in (decision.index - 1, decision.index + 1):
            if 0 <= index < decision.options:
                yield Choice(index, decision.options)
        return
    for smaller, larger in permutations(range(len(decision.factors)), 2):
        moved = _moved(decision, smaller, larger)
        if moved is not None:
            yield moved


def _moved(tile: Tile, smaller: int, larger: int) -> Tile | None:
    """One factor at its next larger divisor of what both make together, the other at what is left."""
    together = tile.factors[smaller] * tile.factors[larger]
    following = next((d for d in divisors(together) if d > tile.factors[larger]), None)
    if following is None or (larger == len(tile.factors) - 1 and following > tile.most):
        return None
    factors = list(tile.factors)
    factors[larger], factors[smaller] = following, together // following
    return Tile(tuple(factors), tile.most)
