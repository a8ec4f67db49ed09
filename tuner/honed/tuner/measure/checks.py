"""The checks a candidate must pass: each a pure function that returns a refusal or None, and a table row.

Tables and rows are in the order in which they are applied. docs/dev/verdicts.md says what each refusal means
and where the figures come from.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from honed.machine.families import MaliModel
from honed.machine.profile import DeviceLimits, DevicePeaks, DeviceProfile, peak_gbs, peak_gflops
from honed.runtime.execution import verification
from honed.tuner.lower.barriers import divergent_barriers
from honed.tuner.measure.candidate import Candidate, MeasureLimits, Workload
from honed.tuner.records.rows import Outcome


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason to drop a candidate; `tainted`: the device's state is no longer reliable."""

    outcome: Outcome
    reason: str
    tainted: bool = False


S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class VerdictCheck(Generic[S]):
    """A check as a row of a table: its name, and the function that refuses by what was observed.

    Before a refusal is final, `more_runs` runs are made, as the machine may have been busy, and with
    `fresh_peaks` the device's peaks are measured again.
    """

    name: str
    refuses: Callable[[S], Refusal | None]
    more_runs: int = 0
    fresh_peaks: bool = False


def first_of(refusals: Iterable[Refusal | None]) -> Refusal | None:
    """Return the first refusal of an iterable; None where it has none."""
    return next((refusal for refusal in refusals if refusal is not None), None)


def first_refusal(table: Sequence[VerdictCheck[S]], seen: S, without: Container[str] = ()) -> Refusal | None:
    """Return the refusal of the first row that refuses; `without` names checks to skip."""
    return first_of(check.refuses(seen) for check in table if check.name not in without)


def source_size(source: str, limit: int) -> Refusal | None:
    """Refuse a source longer than the profile's bound (bytes)."""
    size = len(source.encode())
    if size <= limit:
        return None
    return Refusal(Outcome.BUILD, f"its source has {size} bytes and the device's profile allows {limit}")


def barriers(source: str) -> Refusal | None:
    """Refuse a barrier that some work-items of a group may not reach."""
    found = divergent_barriers(source)
    return Refusal(Outcome.BARRIER, found[0]) if found else None


def sound(workload: Workload, candidate: Candidate, limits: DeviceLimits) -> Refusal | None:
    """Refuse launches whose arguments or geometry cannot be right."""
    sizes = [value.nbytes for value in (*workload.parameters, *candidate.inner)]
    for launch in candidate.launches:
        if any(not 0 <= index < len(sizes) for index in launch.args):
            return Refusal(Outcome.BUILD, f"launch {launch.entry} names a buffer that does not exist")
        for index, kind in zip(launch.args, launch.arg_types, strict=True):
            if kind.nbytes > sizes[index]:
                return Refusal(
                    Outcome.BUILD,
                    f"launch {launch.entry} needs {kind.nbytes} bytes of buffer {index}, "
                    f"which has {sizes[index]}",
                )
        if not limits.allows_group(launch.block) or min(*launch.grid, *launch.block) < 1:
            return Refusal(
                Outcome.BUILD,
                f"launch {launch.entry} has work-groups of {list(launch.block)} and the device takes "
                f"{limits.max_work_group_size} work-items",
            )
    return None


def memory(nbytes: int, limit: int) -> Refusal | None:
    """Refuse buffers that take more than `limit` bytes together."""
    if nbytes <= limit:
        return None
    return Refusal(Outcome.MEMORY, f"its buffers need {nbytes >> 20} MiB and {limit >> 20} MiB are allowed")


def private_memory(name: str, each: int, items: int, units: int, limit: int) -> Refusal | None:
    """Refuse a kernel whose work-items need more private memory than `limit`, with a group on every unit.

    `each` is the driver's figure for one work-item (bytes), `items` the number of work-items in a group.
    """
    need = each * items * units
    if need <= limit:
        return None
    return Refusal(
        Outcome.MEMORY,
        f"kernel {name} needs {each} bytes of private memory for each work-item, {need >> 20} MiB on the "
        f"whole device, and {limit >> 20} MiB are allowed",
    )


@dataclass(frozen=True, slots=True)
class Submitted:
    """A candidate that has not reached the device yet."""

    workload: Workload
    candidate: Candidate
    profile: DeviceProfile
    limits: MeasureLimits


def _memory(seen: Submitted) -> Refusal | None:
    values = (*seen.workload.parameters, *seen.candidate.inner)
    return memory(sum(value.nbytes for value in values), seen.limits.memory_bytes)


# Checks before anything reaches the device.
SUBMITTED: tuple[VerdictCheck[Submitted], ...] = (
    VerdictCheck(
        "source", lambda seen: source_size(seen.candidate.source, seen.profile.rules.max_source_bytes)
    ),
    VerdictCheck("barriers", lambda seen: barriers(seen.candidate.source)),
    VerdictCheck("sound", lambda seen: sound(seen.workload, seen.candidate, seen.profile.limits)),
    VerdictCheck("memory", _memory),
)


Array = NDArray[np.generic]


def guard_intact(before: Array, after: Array, poison: int, which: str) -> Refusal | None:
    """Refuse where a byte next to a buffer is no longer `poison`; the bands are uint8."""
    damaged_before, damaged_after = np.flatnonzero(before != poison), np.flatnonzero(after != poison)
    if damaged_after.size:
        nearest = f"{int(damaged_after[0])} bytes beyond its end"
    elif damaged_before.size:
        nearest = f"{before.size - int(damaged_before[-1])} bytes before its start"
    else:
        return None
    count = damaged_before.size + damaged_after.size
    return Refusal(
        Outcome.OUT_OF_BOUNDS,
        f"it writes outside {which}: {count} bytes, the nearest of them {nearest}",
        tainted=True,
    )


def check_unchanged(before: Array, after: Array, which: str) -> Refusal | None:
    """Refuse an input that differs from what was written, bit for bit."""
    if _bits(before).shape == _bits(after).shape and bool((_bits(before) == _bits(after)).all()):
        return None
    return Refusal(Outcome.OUT_OF_BOUNDS, f"it writes into {which}")


def check_written(first: Array, poison: int, second: Array, other: int, which: str) -> Refusal | None:
    """Refuse elements unchanged by both of two runs on the same inputs.

    The output was all bytes `poison` before the first and all bytes `other` before the second, so a written
    value can look like one of them, not like both.
    """
    size = first.dtype.itemsize
    left = (_bits(first) == _repeat_byte(poison, size)) & (_bits(second) == _repeat_byte(other, size))
    count = int(np.count_nonzero(left))
    if not count:
        return None
    return Refusal(Outcome.UNWRITTEN, f"it leaves {count} of {left.size} elements of {which} unwritten")


def check_repeated(first: Array, second: Array, which: str) -> Refusal | None:
    """Refuse where two runs on the same inputs did not give the same bits.

    No kernel of the tuner uses atomics, so only missing synchronisation or reads of unwritten memory can make
    runs differ.
    """
    count = int(np.count_nonzero(_bits(first) != _bits(second)))
    if not count:
        return None
    return Refusal(
        Outcome.WRONG,
        f"it gives other answers to the same inputs: {count} of {first.size} elements of {which}",
    )


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """A reference with its scale, computed once for all comparisons."""

    array: Array
    tolerance: float
    scale: float  # Largest |value|, 0 where some value is not finite or the dtype is exact

    @classmethod
    def of(cls, array: Array, tolerance: float) -> ExpectedOutput:
        """Prepare a reference array."""
        scale = 0.0
        if array.dtype.kind == "f" and array.size and tolerance:
            largest = float(np.max(np.abs(array)))
            scale = largest if np.isfinite(largest) else 0.0
        return cls(array, tolerance, scale)


def right(expected: ExpectedOutput, actual: Array, which: str) -> Refusal | None:
    """Refuse differences from the reference beyond the tolerance, as `verification.compare` defines them."""
    if expected.scale and _surely_right(expected, actual):
        return None
    difference = verification.compare(expected.array, actual, expected.tolerance, which)
    return None if difference.right else Refusal(Outcome.WRONG, str(difference))


def _surely_right(expected: ExpectedOutput, actual: Array) -> bool:
    """Compare in one pass in single precision; the exact comparison accepts all it accepts (NaN never)."""
    kind = np.promote_types(expected.array.dtype, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(np.subtract(actual, expected.array, dtype=kind))
    return bool(np.max(error) <= 0.999 * expected.tolerance * expected.scale)


def _bits(array: Array) -> NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def _repeat_byte(byte: int, size: int) -> int:
    return int.from_bytes(bytes([byte]) * size, "little")


@dataclass(frozen=True, slots=True)
class RunOutput:
    """An output after a run; `earlier` is the output of another run on the same inputs, None without one."""

    name: str
    expected: ExpectedOutput
    array: Array
    earlier: Array | None = None


@dataclass(frozen=True, slots=True)
class MemoryAfterRun:
    """Memory after a run, all of which was filled with bytes `poison` before.

    `bands` are the guard bands before and after each buffer, `inputs` the arrays written and the present
    contents. `unjudged` is the poison of the earlier run where its outputs have not been checked yet.
    """

    poison: int
    bands: Sequence[tuple[str, Array, Array]]
    inputs: Sequence[tuple[str, Array, Array]] = ()
    outputs: Sequence[RunOutput] = ()
    unjudged: int | None = None


def _all_intact(left: MemoryAfterRun) -> Refusal | None:
    return first_of(guard_intact(before, after, left.poison, name) for name, before, after in left.bands)


def _all_written(left: MemoryAfterRun) -> Refusal | None:
    if left.unjudged is None:
        return None
    return first_of(
        check_written(output.earlier, left.unjudged, output.array, left.poison, output.name)
        for output in left.outputs
        if output.earlier is not None
    )


def _all_right(left: MemoryAfterRun) -> Refusal | None:
    earlier = [] if left.unjudged is None else [(o, o.earlier) for o in left.outputs if o.earlier is not None]
    answers = [*earlier, *((output, output.array) for output in left.outputs)]
    return first_of(right(output.expected, found, output.name) for output, found in answers)


def _all_repeated(left: MemoryAfterRun) -> Refusal | None:
    return first_of(
        check_repeated(output.earlier, output.array, output.name)
        for output in left.outputs
        if output.earlier is not None
    )


# Checks after each examined run.
AFTER_RUN: tuple[VerdictCheck[MemoryAfterRun], ...] = (
    VerdictCheck("guards", _all_intact),
    VerdictCheck(
        "inputs", lambda left: first_of(check_unchanged(given, now, name) for name, given, now in left.inputs)
    ),
    VerdictCheck("written", _all_written),
    VerdictCheck("right", _all_right),
    VerdictCheck("repeated", _all_repeated),
)


# Factor over the microbenchmarks' rates beyond which no evidence makes a time believable: honest kernels
# reached 1.3 of these rates, and 2.2 of those of a busy machine; liars begin at 10.
BELIEVABLE = 3.0
# Four 8-bit multiply-adds fit one lane of 32 bits (dot-product instructions).
INTEGER_GAIN = 4.0


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The highest rates of the device for a workload's amount of work, per second."""

    operations: float
    bytes: float


def ceiling(workload: Workload, peaks: DevicePeaks) -> Ceiling:
    """Return the most that the device can do with a workload: operations and bytes per second."""
    gflops = peak_gflops(peaks, half=False)
    if workload.half:
        gflops = max(gflops, peak_gflops(peaks, half=True))
    if workload.integer:
        gflops *= INTEGER_GAIN
    return Ceiling(operations=gflops * 1e9, bytes=peak_gbs(peaks, workload.bytes) * 1e9)


def physical(workload: Workload, measured: Ceiling, model: MaliModel | None, cores: int) -> Ceiling:
    """Return limits far above measured microbenchmarks, beyond which no evidence makes a time believable.

    Where the GPU's model is known, its multiply-adds at a clock that no such chip reaches bound it more
    tightly.
    """
    operations = BELIEVABLE * measured.operations
    if model is not None and not workload.integer:
        chip = model.most_gflops(cores, half=workload.half) * 1e9
        operations = max(measured.operations, min(operations, chip))
    return Ceiling(operations=operations, bytes=BELIEVABLE * measured.bytes)


def beyond(workload: Workload, most: Ceiling, seconds: float) -> str:
    """Return why a time is shorter than `most` allows, for a sentence; empty where it is not."""
    rate, moved = workload.flops / seconds, workload.bytes / seconds
    if rate > most.operations:
        return (
            f"{seconds * 1e6:.4g} us would be {rate * 1e-9:.4g} GFLOP/s and the device's measured peak "
            f"allows {most.operations * 1e-9:.4g}"
        )
    if moved > most.bytes:
        return (
            f"{seconds * 1e6:.4g} us would move {moved * 1e-9:.4g} GB/s and what was measured at this size "
            f"allows {most.bytes * 1e-9:.4g} GB/s"
        )
    return ""


COMPLETE = 0  # CL_COMPLETE
# A time beyond the measured peaks needs evidence: runs that were verified one by one took at most this many
# times the claimed time, however cold their caches were,
REPEATABLE = 2.0
# And by the host's clock a long series of runs took at most this many times the claimed time.
CLOCKS_AGREE = 1.25
WALL_SLACK = 100e-6  # Seconds the device's time may exceed the host's, and 2 % for clocks that drift
WALL_DRIFT = 1.02
WALL_RATIO = 8.0
WALL_PER_FINISH = 5e-3
WALL_PER_LAUNCH = 50e-6
# Limits of a run on inputs that were just written, with a clock that may be low, against one of many in a
# row.
ANEW_RATIO = 8.0
ANEW_SLACK = 200e-6  # Seconds


@dataclass(frozen=True, slots=True)
class Launched:
    """The driver's report on a launch: execution status, START and END in nanoseconds."""

    status: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The launches between two waits for the device; `wall` in seconds by the host's clock."""

    launches: tuple[Launched, ...]
    wall: float

    @property
    def seconds(self) -> float:
        """Seconds by the device's clock in all launches."""
        return sum(launch.end - launch.start for launch in self.launches) * 1e-9


def check_completed(run: Finished) -> Refusal | None:
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
    """Refuse a time in which the device can neither have computed nor moved the work of the workload."""
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
    """Refuse a time beyond the measured peak without evidence; `claim` says what it exceeds.

    `seconds` is one run's by the device's clock. `proven` are runs that were found right one by one, `series`
    waits for `times` runs each. By the host's clock one series at least must have been as fast, as the host
    may be busy now and then; `launch` seconds for every launch are the device's own cost between them.
    """
    alone = min(run.seconds for run in proven)
    if alone > REPEATABLE * seconds:
        return Refusal(
            Outcome.IMPOSSIBLE,
            f"{claim}, and no run that was verified took less than {alone * 1e6:.4g} us",
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


def check_computed_anew(fresh: Sequence[Finished], seconds: float) -> Refusal | None:
    """Refuse where each run on inputs just written took far longer than `seconds`, that of many in a row.

    Such a candidate skips work while nothing changes, but a model's inputs always change.
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
    """A wait for the device; the launches may take `limit` seconds, None for any time."""

    run: Finished
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A time that a candidate claims, in seconds, beside what no device of this model can do.

    `runs` were made one by one on the same inputs; none where the host's clock cannot judge them.
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


# Checks after each wait for the device.
AFTER_WAIT: tuple[VerdictCheck[Waited], ...] = (
    VerdictCheck("completed", lambda seen: check_completed(seen.run)),
    VerdictCheck("deadline", lambda seen: in_time(seen.run, seen.limit) if seen.limit is not None else None),
    VerdictCheck("wall", lambda seen: wall_above(seen.run)),
)
# Checks after the first runs, and once the median is known.
TIME_CLAIMS: tuple[VerdictCheck[Claimed], ...] = (
    VerdictCheck("wall", lambda seen: wall_below(seen.runs), more_runs=8),
    VerdictCheck(
        "possible", lambda seen: possible(seen.workload, seen.limit, seen.seconds), fresh_peaks=True
    ),
)
# Once the median is known.
TIMED: tuple[VerdictCheck[TimedRuns], ...] = (
    VerdictCheck("anew", lambda seen: check_computed_anew(seen.fresh, seen.seconds), more_runs=4),
)
