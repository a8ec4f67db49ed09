"""A measuring child with clocks that no load moves: made up, as no driver at hand has such.

Its driver says that every launch takes a millisecond, and its host counts its first argument times that. Its
device never shows more than its profile says.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from honed.protocol.values import DevicePeaks
from honed.tuner.measure import child, timing
from honed.tuner.measure.checks import Finished, Launched
from honed.tuner.measure.session import peaks

SECONDS = 1e-3  # of a launch
NO_MORE = DevicePeaks(fp32_gflops=0.0, fp16_gflops=None, bandwidth_gbs=0.0, launch_us=1e3)


def command(host: float) -> tuple[str, ...]:
    """The child whose host counts `host` times what its device counts."""
    return sys.executable, "-m", "tests.tuner.liars.owned_clocks", str(host)


def owned(ticks: Iterator[int], event: Any) -> Launched:
    """The driver's status, between one millisecond and the next."""
    status, number = timing.reading(event).status, next(ticks)
    return Launched(status, round(number * SECONDS * 1e9), round((number + 1) * SECONDS * 1e9))


def finished(host: float, launches: tuple[Launched, ...], _: float) -> Finished:
    """What a wait for launches took, by both clocks."""
    return Finished(launches, host * Finished(launches, 0.0).seconds)


if __name__ == "__main__":
    timing.Finished = partial(finished, float(sys.argv[1]))  # type: ignore[assignment, misc]
    peaks.measure = lambda *_, **__: NO_MORE
    child.main(read=partial(owned, itertools.count()))
