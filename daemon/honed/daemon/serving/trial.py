"""Provides the paired trial: two runners of the same work take turns until the comparison is decided."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from honed.daemon.aio import in_thread
from honed.daemon.worker.calls import ComparisonRun
from honed.machine.processors import OtherLoadMeter
from honed.runtime.engines import MAX_PAIRS, PairedTiming

_BUSY_PERCENT = 10.0  # Load of other programs, of all processors, above which times are provisional
_LOOK_SECONDS = 0.2  # Minimum time over which the load is measured; the kernel counts ticks of 10 ms
Runner = Callable[[int], Awaitable[ComparisonRun]]  # Runs a model on the inputs of a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTrialResult:
    """The times of two runners, and what is `wrong` with the second one's outputs, or "".

    The times are provisional if other programs took `others_percent` of the processors; None: they are final.
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
        """The reason why the second runner, a new version, cannot replace the first, or "".

        With an allowance below 1 it must be faster. Otherwise it serves already, and must not be slower.
        """
        if self.wrong:
            return f"its answers differ from those of the version before: {self.wrong}"
        if self.runs.within_allowance:
            return ""
        times = f"{self.first_us / 1000:.3g} ms before, {self.second_us / 1000:.3g} ms now"
        if self.runs.allowance > 1:
            return f"it is slower in service ({times})"
        return f"side by side in the serving worker it is not faster ({times})"


async def paired_trial(
    first: Runner,
    second: Runner,
    allowed: float,
    processes: tuple[int, ...] = (),
    most: int = MAX_PAIRS,
) -> PairedTrialResult:
    """Compare two runners; the second is fast enough at `allowed` times the time of the first.

    Each takes at most `most` turns, but at least one for each set of inputs; the trial ends at the first
    wrong output. Load by programs other than `processes` makes the times provisional. Without
    `processes`, as on a device of its own, the load is not measured. Raises what a runner raises.
    """
    others, since = None, time.monotonic()
    if processes:
        others = await in_thread(OtherLoadMeter, processes)
    runs, sets = PairedTiming(allowed, most), 1
    while runs.tried < sets or not runs.done:
        turn, both = runs.tried, [ComparisonRun(), ComparisonRun()]
        for which in runs.order:
            both[which] = ran = await (second if which else first)(turn)
            sets = max(sets, ran.sets)
        one, other = both
        runs.add(one.ns / 1e9, other.ns / 1e9, (one.clock_hz, other.clock_hz))
        if wrong := one.wrong or other.wrong:
            return PairedTrialResult(runs=runs, wrong=wrong)
    if others is None:
        return PairedTrialResult(runs=runs)
    await asyncio.sleep(since + _LOOK_SECONDS - time.monotonic())
    percent = await in_thread(others.percent) or 0.0
    return PairedTrialResult(runs=runs, others_percent=percent if percent > _BUSY_PERCENT else None)
