"""Timing where the device's clock changes: what ran at another clock is no time of the candidate's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.machine.opencl import cl
from honed.tuner.measure.candidate import MeasureLimits
from honed.tuner.measure.checks import Launched
from honed.tuner.measure.timing import InterleavedTiming, SamplingPlan, Warmth, time_candidate
from honed.tuner.records.rows import Timing

SLOW, FAST = 600_000_000, 1_000_000_000  # Hz
WORK = 1e6  # cycles of a run of the candidate; the yardstick takes a tenth
ONE = SamplingPlan(runs=1, group=1)


class Gpu:
    """A device whose clock is what it is asked to be, one after the other: it changes with each wait."""

    def __init__(self, clocks: Iterator[int | None]) -> None:
        self._clocks = clocks
        self.hz = next(clocks)

    def clock(self) -> int | None:
        return self.hz

    def finish(self) -> None:
        self.hz = next(self._clocks, self.hz)

    def event(self, cycles: float) -> Callable[[], Launched]:
        ns = round(1e9 * cycles / (self.hz or FAST))
        return lambda: Launched(cl.command_execution_status.COMPLETE, 0, ns)


def turns(*clocks: int | None) -> InterleavedTiming:
    gpu = Gpu(iter(clocks))
    bound = SimpleNamespace(enqueue=lambda: [gpu.event(WORK)])
    yardstick = SimpleNamespace(enqueue=lambda: gpu.event(WORK / 10))
    return InterleavedTiming(cast(Any, bound), cast(Any, yardstick), gpu, lambda event: event(), gpu.clock)


def timed(made: InterleavedTiming, *, clock: int = 0, **limits: float) -> Timing:
    everything = MeasureLimits(**{"timing_seconds": 60.0, **limits})  # type: ignore[arg-type]
    checks = frozenset({"run", "deadline", "wall"})
    found = time_candidate(made, ONE, everything, without=checks, slow=False, clock=clock)
    assert isinstance(found, Timing)
    return found


def test_what_ran_before_the_clock_was_up_does_not_count() -> None:
    made = turns(SLOW, SLOW, SLOW, FAST)
    found = timed(made)
    assert (found.median_s, found.low_s, found.high_s) == (1e-3, 1e-3, 1e-3)
    assert made.clock == FAST
    assert made.yardstick == pytest.approx(1e-4)
    assert found.repeats == 6 < len(made)


def test_what_ran_while_the_clock_fell_does_not_count() -> None:
    made = turns(FAST, FAST, FAST, FAST, SLOW, SLOW, FAST)
    assert timed(made).median_s == 1e-3
    assert len(made.runs) == len(made.yardsticks) == 6


def test_a_candidate_is_timed_until_the_clock_is_what_it_was_for_others() -> None:
    made = turns(*[SLOW] * 10, FAST)
    assert timed(made, clock=FAST).median_s == 1e-3


def test_throttling_that_lasts_ends_with_the_time_there_is() -> None:
    made = turns(SLOW)
    found = timed(made, clock=FAST, timing_seconds=0.0)
    assert (found.median_s, made.clock) == (pytest.approx(1 / 600), SLOW)
    throttled = turns(FAST, FAST, SLOW)
    assert timed(throttled, timing_seconds=0.0).median_s == 1e-3
    assert len(timed_out := turns(FAST, FAST, *[SLOW] * 99)) == 0
    assert timed(timed_out).repeats == 1


def test_without_a_clock_to_read_every_sample_counts() -> None:
    made = turns(None)
    found = timed(made, clock=0)
    assert (found.median_s, found.repeats, made.clock) == (1e-3, 6, 0)


def test_the_clock_of_late_is_the_highest_until_throttling_has_lasted() -> None:
    warmth = Warmth()
    assert warmth.clock == 0
    warmth.note(1e-4, FAST)
    warmth.note(1e-4)
    assert warmth.clock == FAST
    for _ in range(16):
        warmth.note(2e-4, SLOW)
    assert warmth.clock == SLOW
