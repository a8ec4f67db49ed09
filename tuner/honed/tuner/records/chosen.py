"""Which records travel: to serve by, to keep others from what went wrong, and to learn from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Final

from honed.tuner.verdict import Stored

from . import hints
from .rows import RecordState, Setup, TuningRecord
from .store import Records

SPREAD: Final = 24  # candidates of a workload
LEAST_SPREAD: Final = 8  # likewise, where there are many workloads
MOST_SPREAD: Final = 20_000  # about so many in all


def own(records: Records, setup: Setup) -> Iterator[TuningRecord]:
    """The best of each workload, and what is in quarantine, without what a hub brought.

    Another board should not try what is in quarantine either.
    """
    banned = (found for found in records.finished(setup) if found.state is RecordState.QUARANTINED)
    return (found for found in chain(records.distil(setup), banned) if not hints.source(found))


def spread(records: Records, setup: Setup) -> Iterator[TuningRecord]:
    """Of each workload candidates from the fastest to the slowest and the refused, to learn a prior from.

    The same for the same records; without what a hub brought, and without trials that were cut off.
    """
    ranked: dict[str, list[tuple[float, str]]] = {}
    for found in _judged(records, setup):
        ranked.setdefault(found.workload, []).append((_seconds(found), found.trace_sha256))
    each = min(SPREAD, max(LEAST_SPREAD, MOST_SPREAD // max(1, len(ranked))))
    kept = {
        (workload, trace) for workload, all_ in ranked.items() for _, trace in _evenly(sorted(all_), each)
    }
    return (found for found in _judged(records, setup) if (found.workload, found.trace_sha256) in kept)


def _judged(records: Records, setup: Setup) -> Iterator[TuningRecord]:
    return (
        found
        for found in records.finished(setup)
        if found.outcome is not Stored.ABANDONED and not hints.source(found)
    )


def _seconds(found: TuningRecord) -> float:
    right = found.outcome is Stored.RIGHT and found.timing is not None
    return found.timing.fair_s if right and found.timing is not None else math.inf


def _evenly(ranked: list[tuple[float, str]], most: int) -> list[tuple[float, str]]:
    """The first, the last, and as many between."""
    if len(ranked) <= most:
        return ranked
    return [ranked[round(n * (len(ranked) - 1) / (most - 1))] for n in range(most)]
