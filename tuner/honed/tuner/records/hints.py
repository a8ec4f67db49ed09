"""Hints: what boards that share a hub have measured, tried here before it counts (docs/hub.md).

A hint is a record whose `measured_by` names the key that signed it (honed.protocol.params). Its compiler is
no board's, so its time is never taken for one of ours. What came of trying it is a record of our own, from
which it follows what each source's hints are worth: nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from honed.protocol.params import HintFigures, source_of

from .rows import TuningRecord

PER_TASK: Final = 4  # trials that the hints of one task may cost in a day, where nothing else was said
DAY: Final = 86400.0
REMEMBERED: Final = 30 * DAY  # that a hint which failed speaks against its source
MOST: Final = 50_000  # of one source; older ones go
MOST_IN_ALL: Final = 500_000
MOST_TOLD: Final = 100  # sources of which there are figures, for messages have limits
# One that takes so many times as long as on the board that measured it, with the same driver, has failed.
SLOWER: Final = 3.0
_FAILED, _SHARE = 3, 0.2  # so many, and more than this share of those tried: the source is set aside


def source(record: TuningRecord) -> str:
    """The name of the key that signed it; "" where it is none of a hub's."""
    return source_of(record.measured_by)


def figures(taken: int, tried: int, failed: int) -> HintFigures:
    """What a source's hints are worth."""
    aside = failed >= _FAILED and failed > _SHARE * tried
    return HintFigures(taken=taken, tried=tried, failed=failed, aside=aside)


def foremost(worth: Mapping[str, HintFigures]) -> dict[str, HintFigures]:
    """Those of sources that matter most, in their order: set aside, then tried, then taken most often."""
    first = sorted(worth, key=lambda name: (worth[name].aside, worth[name].tried, worth[name].taken))
    kept = frozenset(first[-MOST_TOLD:])
    return {name: each for name, each in worth.items() if name in kept}


def chosen(found: Iterable[TuningRecord], aside: frozenset[str], limit: int) -> list[TuningRecord]:
    """The first of each schedule, at most `limit`, none of sources that are set aside."""
    kept: dict[str, TuningRecord] = {}
    for one in found:
        if len(kept) >= limit:
            break
        if source(one) not in aside:
            kept.setdefault(one.trace_sha256, one)
    return list(kept.values())
