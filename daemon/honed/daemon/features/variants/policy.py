"""Which variants are made, kept, and loaded, within the bounds of the configuration. No I/O, no clocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from honed.daemon.observe.usage import Wish
from honed.daemon.settings.schema import VariantSettings
from honed.protocol import strict

# What is kept goes only for what is asked for so many times as often: two that are asked for in turns would
# be compiled again and again.
_BETTER = 1.5
_STAY_SECONDS = 60.0  # that what was asked for stays loaded, for the same reason
_HOPELESS = 2  # shapes of a model that could not be compiled, while none could: it is not for their sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVariant:
    """A variant of the store. `requests` for it decay; `nbytes` are of its files, `loaded` of its device.

    `used` is when it was asked for last, in monotonic seconds.
    """

    name: str
    model: str
    requests: float
    by_hand: bool
    nbytes: int
    loaded: int
    used: float


def next_wish(
    wishes: Iterable[Wish], kept: Sequence[KeptVariant], settings: VariantSettings, nbytes: dict[str, int]
) -> Wish | None:
    """The shapes to be compiled next: those asked for most often, of those that would be kept.

    `nbytes` is what the file of a variant takes, by model.
    """
    wishes = list(wishes)
    there = {each.name for each in kept}
    hopeless = _hopeless(wishes, {each.model for each in kept})
    often = [
        wish
        for wish in wishes
        if wish.requests >= settings.requests
        and not wish.failed
        and wish.name not in there
        and wish.model not in hopeless
    ]
    often.sort(key=lambda wish: (-wish.requests, wish.name))
    return next((wish for wish in often if _has_room(wish, kept, settings, nbytes[wish.model])), None)


def surplus(kept: Sequence[KeptVariant], settings: VariantSettings) -> list[str]:
    """What is dropped to keep the bounds on number and disk, those least asked for first; none by hand."""
    dropped: list[str] = []
    left = sorted(kept, key=lambda each: (each.requests, each.name))
    for one in list(left):
        of_model = sum(each.model == one.model for each in left)
        too_many = of_model > settings.per_model
        too_large = sum(each.nbytes for each in left) > settings.disk_bytes
        if not one.by_hand and (too_many or too_large):
            left.remove(one)
            dropped.append(one.name)
    return dropped


def room_for(
    loaded: int, serving: Sequence[KeptVariant], settings: VariantSettings, now: float
) -> list[str] | None:
    """What is to rest so that another, of `loaded` bytes, is loaded within the bound on memory.

    Those that were asked for the longest ago first; None where there is no room without what is asked for.
    """
    resting: list[str] = []
    free = settings.memory_bytes - loaded - sum(each.loaded for each in serving)
    for one in sorted(serving, key=lambda each: each.used):
        if free >= 0:
            break
        if now - one.used < _STAY_SECONDS:
            return None
        resting.append(one.name)
        free += one.loaded
    return resting if free >= 0 else None


def _hopeless(wishes: Sequence[Wish], with_variants: set[str]) -> set[str]:
    failures: dict[str, int] = {}
    for wish in wishes:
        failures[wish.model] = failures.get(wish.model, 0) + bool(wish.failed)
    return {model for model, count in failures.items() if count >= _HOPELESS} - with_variants


def _has_room(wish: Wish, kept: Sequence[KeptVariant], settings: VariantSettings, nbytes: int) -> bool:
    new = strict.like(KeptVariant, wish, by_hand=False, nbytes=nbytes, loaded=0, used=0.0)
    going = set(surplus((*kept, new), settings))
    return wish.name not in going and all(
        each.requests * _BETTER < wish.requests for each in kept if each.name in going
    )
