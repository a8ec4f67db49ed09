"""Checks of what two clocks say: the device's, and the host's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from honed.tuner.measure.candidate import Workload
from honed.tuner.verdict import Outcome

from .ceiling import Ceiling, beyond
from .row import Refusal, VerdictCheck

COMPLETE = 0  # CL_COMPLETE
# What is beyond the measured peaks takes evidence: runs that were proven right one by one took no longer than
# this often the claimed time, however cold their caches were,
REPEATABLE = 2.0
# and by the host's clock a long series of runs took no longer than this often the claimed time.
CLOCKS_AGREE = 1.25
WALL_SLACK = 100e-6  # seconds the device's time may exceed the host's, and 2 % for clocks that drift
WALL_DRIFT = 1.02
WALL_RATIO = 8.0
WALL_PER_FINISH = 5e-3
WALL_PER_LAUNCH = 50e-6
# A run on inputs that were just written, at a clock that may not be up yet, against one of many in a row.
ANEW_RATIO = 8.0
ANEW_SLACK = 200e-6  # seconds


@dataclass(frozen=True, slots=True)
class Launched:
    """What the driver says of one launch: execution status, START and END in nanoseconds."""

    status: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Everything between two waits for the device; `wall` in seconds by the host's clock."""

    launches: tuple[Launched, ...]
    wall: float

    @property
    def seconds(self) -> float:
        """The device's time in all launches."""
        return sum(launch.end - launch.start for launch in self.launches) * 1e-9


def completed(run: Finished) -> Refusal | None:
    """Refuse a launch that did not end as COMPLETE, or whose START is not before its END."""
    for number, launch in enumerate(run.launches):
        if launch.status != COMPLETE:
            return Refusal(Outcome.RUN, f"launch {number} ended with status {launch.status}", tainted=True)
        if launch.start >= launch.end:
            return Refusal(
                Outcome.RUN,
                f"launch {number} reports START {launch.start} ns and END {launch.end} ns: it did not run",
                tainted=True,
            )
    return None


def in_time(run: Finished, limit: float) -> Refusal | None:
    """Refuse a run that took longer than `limit` seconds."""
    if run.seconds <= limit:
        return None
    return Refusal(Outcome.DEADLINE, f"a run takes {run.seconds:.3g} s and {limit:g} s are allowed")


def wall_above(run: Finished) -> Refusal | None:
    """Refuse more time by the device's clock than passed on the host (one in-order queue)."""
    if run.seconds <= run.wall * WALL_DRIFT + WALL_SLACK:
        return None
    return Refusal(
        Outcome.RUN,
        f"the device reports {run.seconds * 1e3:.3g} ms in {run.wall * 1e3:.3g} ms of wall time",
        tainted=True,
    )


def wall_below(runs: Sequence[Finished]) -> Refusal | None:
    """Refuse where each of several finishes took far longer on the host than the device admits."""
    excess = [
        run.wall - (WALL_RATIO * run.seconds + WALL_PER_FINISH + WALL_PER_LAUNCH * len(run.launches))
        for run in runs
    ]
    if not runs or min(excess) <= 0:
        return None
    run = runs[int(np.argmin(excess))]
    return Refusal(
        Outcome.RUN,
        f"the host waited {run.wall * 1e3:.3g} ms for what the device says took {run.seconds * 1e3:.3g} ms",
        tainted=True,
    )


def possible(workload: Workload, limit: Ceiling, seconds: float) -> Refusal | None:
    """Refuse a time in which the device can neither have computed nor moved what the workload needs."""
    why = beyond(workload, limit, seconds)
    return Refusal(Outcome.IMPOSSIBLE, why) if why else None


def evident(
    claim: str,
    seconds: float,
    proven: Sequence[Finished],
    series: Sequence[Finished],
    times: int,
    launch: float,
) -> Refusal | None:
    """Refuse a time beyond the measured peak without evidence; `claim` says what it is beyond.

    `seconds` is one run's by the device's clock. `proven` are runs that were found right one by one, `series`
    waits for `times` runs each. By the host's clock one series at least must have been as fast, as the host
    may be busy now and then; `launch` seconds for every launch are the device's own cost between them.
    """
    alone = min(run.seconds for run in proven)
    if alone > REPEATABLE * seconds:
        return Refusal(
            Outcome.IMPOSSIBLE,
            f"{claim}, and no run that was proven right took less than {alone * 1e6:.4g} us",
            tainted=True,
        )
    run = min(series, key=lambda run: run.wall)
    if run.wall <= CLOCKS_AGREE * times * seconds + launch * len(run.launches) + WALL_SLACK:
        return None
    return Refusal(
        Outcome.IMPOSSIBLE,
        f"{claim}, and the host counts {run.wall * 1e3:.3g} ms for {times} runs, which would be "
        f"{times * seconds * 1e3:.3g} ms",
        tainted=True,
    )


def computed_anew(fresh: Sequence[Finished], seconds: float) -> Refusal | None:
    """Refuse where each run on inputs just written took far longer than `seconds`, that of many in a row.

    What is done in between is left out when nothing has changed, and a model's inputs always change.
    """
    least = min((run.seconds for run in fresh), default=0.0)
    if least <= ANEW_RATIO * seconds + ANEW_SLACK:
        return None
    return Refusal(
        Outcome.IMPOSSIBLE,
        f"it takes {least * 1e6:.4g} us with new inputs and {seconds * 1e6:.4g} us when they are the same "
        "again: it does not compute anew",
    )


@dataclass(frozen=True, slots=True)
class Waited:
    """One wait for the device; what it was waited for may take `limit` seconds, None for any number."""

    run: Finished
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A time that a candidate claims, in seconds, beside what no device like this one can do.

    `runs` were made one by one on the same inputs; none where the host's clock says nothing of them.
    """

    workload: Workload
    limit: Ceiling
    seconds: float
    runs: Sequence[Finished] = ()


@dataclass(frozen=True, slots=True)
class TimedRuns:
    """The median time of many runs in a row (seconds), beside runs on inputs that were just written."""

    seconds: float
    fresh: Sequence[Finished]


# After each wait for the device.
WAITED: tuple[VerdictCheck[Waited], ...] = (
    VerdictCheck("completed", lambda seen: completed(seen.run)),
    VerdictCheck("deadline", lambda seen: in_time(seen.run, seen.limit) if seen.limit is not None else None),
    VerdictCheck("wall", lambda seen: wall_above(seen.run)),
)
# After the first runs, and once the median is known.
CLAIMED: tuple[VerdictCheck[Claimed], ...] = (
    VerdictCheck("wall", lambda seen: wall_below(seen.runs), more_runs=8),
    VerdictCheck(
        "possible", lambda seen: possible(seen.workload, seen.limit, seen.seconds), fresh_peaks=True
    ),
)
# Once the median is known.
TIMED: tuple[VerdictCheck[TimedRuns], ...] = (
    VerdictCheck("anew", lambda seen: computed_anew(seen.fresh, seen.seconds), more_runs=4),
)
