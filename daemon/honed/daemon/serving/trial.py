"""A trial: two runners of the same work take turns until one is surely fast enough."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from honed.daemon.aio import in_thread
from honed.daemon.idle.signals import OtherLoadMeter
from honed.daemon.worker.calls import ComparisonRun
from honed.runtime.comparison import MOST, PairedTiming

_BUSY_PERCENT = 10.0  # Of all processors taken by other work, above which times are provisional
_LOOK_SECONDS = 0.2  # At what others take of the processors; the kernel counts that in ticks of 10 ms
Runner = Callable[[int], Awaitable[ComparisonRun]]  # Runs a model on the inputs of a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTrialResult:
    """The times of two runners, and what the second one answered `wrong`, or "".

    Times are provisional where other programs took `others_percent` of the processors; None: they hold.
    """

    runs: PairedTiming
    wrong: str = ""
    others_percent: float | None = None

    @property
    def first_us(self) -> float:
        """Microseconds of a run by the first runner."""
        return self.runs.times[0] * 1e6

    @property
    def second_us(self) -> float:
        """Microseconds of a run by the second runner."""
        return self.runs.times[1] * 1e6

    @property
    def objection(self) -> str:
        """Why the second runner, a new version of a model, cannot take the place of the first, or "".

        With an allowance below 1 it must be faster; else it serves already, and must not be slower than that.
        """
        if self.wrong:
            return f"its answers differ from those of the version before: {self.wrong}"
        if self.runs.within_allowance:
            return ""
        times = f"{self.first_us / 1000:.3g} ms before, {self.second_us / 1000:.3g} ms now"
        if self.runs.allowance > 1:
            return f"it is slower in service ({times})"
        return f"side by side in the serving worker it is not faster ({times})"


@dataclass(frozen=True, slots=True)
class PairedTrial:
    """Two runners of the same work; the second is fast enough at `allowed` times the time of the first.

    They take `most` turns each at most, but as many as there are sets of inputs, and stop at the first wrong
    answer. What programs beside `processes` take of the processors makes the times provisional; without
    processes, as on a device of its own, nothing does.
    """

    first: Runner
    second: Runner
    allowed: float
    processes: tuple[int, ...] = ()
    most: int = MOST

    async def run(self) -> PairedTrialResult:
        """Take turns; raise what a runner raises."""
        others, since = None, time.monotonic()
        if self.processes:
            others = await in_thread(OtherLoadMeter, self.processes)
        runs, sets = PairedTiming(self.allowed, self.most), 1
        while runs.tried < sets or not runs.done:
            turn, both = runs.tried, [ComparisonRun(), ComparisonRun()]
            for which in runs.order:
                both[which] = ran = await (self.second if which else self.first)(turn)
                sets = max(sets, ran.sets)
            first, second = both
            runs.add(first.ns / 1e9, second.ns / 1e9, (first.clock_hz, second.clock_hz))
            if wrong := first.wrong or second.wrong:
                return PairedTrialResult(runs=runs, wrong=wrong)
        if others is None:
            return PairedTrialResult(runs=runs)
        await asyncio.sleep(since + _LOOK_SECONDS - time.monotonic())
        percent = await in_thread(others.percent)
        return PairedTrialResult(runs=runs, others_percent=percent if percent > _BUSY_PERCENT else None)
