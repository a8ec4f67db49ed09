"""Timing a candidate that is right: in turns with the yardstick, until its median is known well enough."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from honed.tuner.verdict import Timing

from .bound import BoundCandidate, Reader
from .checks import WAITED, Refusal, first_refusal
from .checks.clocks import Finished, Waited
from .limits import MeasureLimits
from .probes import Yardstick

CONFIDENCE = 0.95
LEAST = 6  # samples: the range of five holds the median with 93.8 %, that of six with 96.9 %
_LEAST_SAMPLE = 50e-6  # seconds; shorter runs are repeated within a sample
_CLOCK_STEPS = 100  # a sample is at least this many steps of the device's clock
_MOST_RUNS = 64  # in a sample
_GROUP = 3  # samples between two waits
_AWAKE = 1.1  # a yardstick within this of the best of late means that the clock is up
_MEMORY = 16  # candidates whose yardsticks are remembered


@dataclass(slots=True)
class Warmth:
    """The fastest yardsticks of late, by which to see whether the device's clock is up (seconds)."""

    best: list[float] = field(default_factory=list)

    def note(self, seconds: float) -> None:
        """Remember a candidate's yardstick; throttling that lasts becomes the new measure."""
        self.best = [*self.best[1 - _MEMORY :], seconds]

    def up(self, seconds: float) -> bool:
        """Whether a yardstick of `seconds` is as fast as of late."""
        return bool(self.best) and seconds <= _AWAKE * min(self.best)


def warm_up(
    bound: BoundCandidate, yardstick: Yardstick, warmth: Warmth, limits: MeasureLimits, read: Reader
) -> None:
    """Keep the device busy until the yardstick is as fast as of late, or the limit has passed."""
    until = time.perf_counter() + limits.warm_seconds
    while not warmth.up(yardstick.seconds()) and time.perf_counter() < until:
        bound.run(read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How samples are taken, from what one run takes (seconds) and how many launches may queue."""

    runs: int  # in a sample
    group: int  # samples between two waits

    @classmethod
    def of(
        cls, seconds: float, launches: int, resolution: float, cap: int, limits: MeasureLimits
    ) -> Schedule:
        """Long enough for the device's clock, short enough for its queue and the run's deadline."""
        wanted = max(_LEAST_SAMPLE, _CLOCK_STEPS * resolution)
        fit = max(1, (cap - 1) // launches)
        runs = max(1, min(_MOST_RUNS, math.ceil(wanted / max(seconds, 1e-9)), fit))
        by_queue = cap // (runs * launches + 1)
        by_time = int(limits.run_seconds / 2 / max(seconds * runs, 1e-9))
        return cls(runs=runs, group=max(1, min(_GROUP, by_queue, by_time)))


class Turns:
    """A candidate and the yardstick, measured in turns on one queue; what was measured so far."""

    def __init__(self, bound: BoundCandidate, yardstick: Yardstick, queue: Any, read: Reader) -> None:
        self._bound = bound
        self._yardstick = yardstick
        self._queue = queue
        self._read = read
        self.runs: list[float] = []  # seconds of one run
        self.yardsticks: list[float] = []  # seconds
        self.last = Finished((), 0.0)  # the last wait

    @property
    def yardstick(self) -> float:
        """The yardstick's median so far, in seconds."""
        return statistics.median(self.yardsticks)

    def take(self, schedule: Schedule) -> None:
        """One more group of samples."""
        began = time.perf_counter()
        taken = []
        for _ in range(schedule.group):
            mark = self._yardstick.enqueue()
            taken.append((mark, [event for _ in range(schedule.runs) for event in self._bound.enqueue()]))
        self._queue.finish()
        wall = time.perf_counter() - began
        everything = []
        for mark, events in taken:
            launched = tuple(self._read(event) for event in events)
            self.runs.append(Finished(launched, wall).seconds / schedule.runs)
            measured = self._read(mark)
            self.yardsticks.append(Finished((measured,), wall).seconds)
            everything += [measured, *launched]
        self.last = Finished(tuple(everything), wall)


def time_candidate(
    turns: Turns, schedule: Schedule, limits: MeasureLimits, *, without: Container[str], slow: bool
) -> Timing | Refusal:
    """Measure until the median is known within `limits.precision`, or a cap is met.

    With `slow`, only `limits.few_repeats` times. Every launch is checked as in the runs
    before, but for the checks named in `without`.
    """
    if slow:
        schedule = Schedule(runs=schedule.runs, group=min(schedule.group, limits.few_repeats))
    began = time.perf_counter()
    while True:
        turns.take(schedule)
        refusal = first_refusal(WAITED, Waited(turns.last), without)
        if refusal is not None:
            return refusal
        if _enough(turns.runs, limits, time.perf_counter() - began, slow):
            break
    found = interval(turns.runs)
    return Timing(median_s=found.median, low_s=found.low, high_s=found.high, repeats=len(turns.runs))


def _enough(runs: list[float], limits: MeasureLimits, elapsed: float, slow: bool) -> bool:
    if slow:
        return len(runs) >= limits.few_repeats
    if len(runs) >= limits.max_repeats:
        return True
    if elapsed >= limits.timing_seconds and len(runs) >= limits.few_repeats:
        return True
    return len(runs) >= LEAST and interval(runs).spread <= limits.precision


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its confidence interval, in the unit of the samples."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """The larger distance from the median to an end, as a share of the median."""
        return max(self.high - self.median, self.median - self.low) / self.median if self.median else math.inf


def interval(samples: Sequence[float]) -> Interval:
    """The median of one or more samples between the order statistics that hold it with 95 %.

    The number of samples below the true median is binomial with p = 1/2, whatever their distribution
    (Conover, Practical Nonparametric Statistics, 3.2). Fewer than six samples do not reach 95 %: the
    interval is then their range.
    """
    ordered = sorted(samples)
    skip = _skipped(len(ordered))
    return Interval(statistics.median(ordered), ordered[skip], ordered[-1 - skip])


@functools.cache
def _skipped(n: int) -> int:
    """How many samples may be left out at each end."""
    tail, skip = 2.0**-n, 0
    while 2 * (tail + math.comb(n, skip + 1) * 2.0**-n) <= 1 - CONFIDENCE:
        skip += 1
        tail += math.comb(n, skip) * 2.0**-n
    return skip
