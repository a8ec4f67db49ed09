"""Verdicts and records, as enumerations and dataclasses. Times are seconds; dates seconds since 1970."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from honed.machine.profile import DeviceIdentity
from honed.protocol.errors import InvalidArgument
from honed.runtime.compiled.model import SearchStrategy

ABANDONED_REASON = "was running when the tuner or the machine stopped"


class StoredOutcome(StrEnum):
    """The step of the verdict at which a candidate ended, as stored in records."""

    NOT_BUILT = "not-built"
    NOT_RUN = "not-run"
    IMPOSSIBLE = "impossible"
    FAULTED = "faulted"
    WRONG = "wrong"
    RIGHT = "right"
    ABANDONED = "abandoned"  # Running when the tuner or the machine stopped


class Outcome(StrEnum):
    """The outcome of a candidate; each but RIGHT is a refusal.

    Records store `stored_as`. A candidate with `quarantines` may have harmed the device, and is not tried
    again.
    """

    stored_as: StoredOutcome
    quarantines: bool

    def __new__(
        cls, text: str, stored_as: StoredOutcome = StoredOutcome.NOT_RUN, quarantines: bool = False
    ) -> Outcome:
        """Create a member whose value is its text."""
        one = str.__new__(cls, text)
        one._value_, one.stored_as, one.quarantines = text, stored_as, quarantines
        return one

    BUILD = "build", StoredOutcome.NOT_BUILT  # The driver's compiler refused it, crashed or took too long
    RUN = "run"  # An event failed, or START was not before END
    DEADLINE = "deadline", StoredOutcome.NOT_RUN, True  # The run exceeded its deadline
    IMPOSSIBLE = "impossible", StoredOutcome.IMPOSSIBLE  # Faster than the device's measured peaks
    FAULT = "fault", StoredOutcome.FAULTED, True  # The kernel log holds a fault of its process
    UNWRITTEN = "unwritten", StoredOutcome.WRONG  # Poisoned output was not overwritten
    OUT_OF_BOUNDS = "out-of-bounds", StoredOutcome.WRONG, True  # A guard band was written
    WRONG = "wrong", StoredOutcome.WRONG  # Differs from the reference
    BARRIER = "barrier", StoredOutcome.NOT_BUILT  # A barrier in divergent control flow
    MEMORY = "memory"  # The device ran out of memory
    CRASH = "crash", StoredOutcome.NOT_RUN, True  # The candidate's process died
    RIGHT = "right", StoredOutcome.RIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one run of all launches, by the device's clock: the median and its 95 % confidence interval.

    `yardstick_ratio` is the time of the yardstick kernel measured beside it over that kernel's reference
    time: above 1 the device was slowed, by heat or its clock. None where either is not known.
    """

    median_s: float
    low_s: float
    high_s: float
    repeats: int
    yardstick_ratio: float | None = None

    @property
    def fair_s(self) -> float:
        """The median converted to the device's reference speed; candidates are ranked by it."""
        return self.median_s / (self.yardstick_ratio or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of measuring a candidate; a RIGHT one has a timing."""

    outcome: Outcome
    reason: str = ""  # A sentence; empty for RIGHT
    timing: Timing | None = None
    yardstick_s: float | None = None  # Median of the yardstick kernel, measured in turns with it
    clock_hz: int | None = None  # Clock of the device while it was timed; None where that cannot be read
    story: str | None = None  # The kernel log's records of its fault
    seconds: float = 0.0  # Wall time of the measurement
    host: str | None = None  # The board of a farm that judged it; None: this machine did


class RecordState(StrEnum):
    """The state of a candidate."""

    IN_FLIGHT = "in-flight"  # Recorded before it runs; unchanged after a crash
    DONE = "done"
    QUARANTINED = "quarantined"  # Never to run again on this device


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementSetup:
    """The conditions of a measurement; records of other setups are set aside."""

    device: DeviceIdentity
    compiler: str  # Version of the compiler and its rules

    @property
    def device_key(self) -> str:
        """The key of the device without its driver."""
        return self.device.key

    @property
    def driver(self) -> str:
        """Version of the OpenCL driver."""
        return self.device.driver_version


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCandidate:
    """A candidate about to run."""

    workload: str  # Key of its tuning task
    setup: MeasurementSetup
    trace: str  # The schedule as JSON text
    source_sha256: str | None = None  # SHA-256 of the kernels' OpenCL C, where it is known already
    way: SearchStrategy | None = None  # Strategy of the search that found it


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """A candidate as recorded. `outcome` is None while it runs for the first time."""

    id: int
    workload: str
    device_key: str
    driver: str
    compiler: str
    trace: str
    trace_sha256: str
    state: RecordState
    outcome: StoredOutcome | None  # Figures count only for RIGHT
    reason: str
    story: str | None
    timing: Timing | None
    source_sha256: str | None
    created_s: float
    finished_s: float | None
    measured_by: str
    way: SearchStrategy | None  # Unknown (None) where it was not recorded, and for records from elsewhere


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A tuning task; equal workloads of several models share it."""

    workload: str
    name: str
    flops: float  # Per run
    bytes: float  # Least traffic per run


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version of a model, and the reason for it."""

    model: str
    version: int  # Version number, from 1
    why: str
    latency_s: float | None  # Measured time of one inference
    created_s: float


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """A model's estimated latency at one moment of a tuning run, as the sum of its tasks' times."""

    trials: int  # Since the previous moment
    latency_s: float
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultScheduleTime:
    """A workload's default schedule at the device's reference speed.

    `rate` is the device's observed rate at the workload's size, in bytes per second, 0 where it is unknown;
    None in records without it.
    """

    seconds: float
    rate: float | None


_TIMING: Final = tuple(field.name for field in fields(Timing))
_COLUMNS: Final = [  # Columns of the candidates that `sql` selects, in order
    column
    for field in fields(TuningRecord)
    for column in (_TIMING if field.name == "timing" else [field.name])
]


def candidate(row: Sequence[Any]) -> TuningRecord:
    """Return the candidate of a row; raise InvalidArgument where a word in it is unknown to this version."""
    values = dict(zip(_COLUMNS, row, strict=True))
    figures = {name: values.pop(name) for name in _TIMING}
    outcome, way = values["outcome"], values["way"]
    try:
        words: dict[str, object] = {
            "state": RecordState(values["state"]),
            "outcome": None if outcome is None else StoredOutcome(outcome),
            "way": None if way is None else SearchStrategy(way),
        }
    except ValueError as error:
        raise InvalidArgument(
            f"record {values['id']} of task {values['workload'][:12]} is of another version of honed "
            f"({error}); use the version that wrote the records, or move their file away to begin anew"
        ) from error
    timing = None if figures["median_s"] is None else Timing(**figures)
    return TuningRecord(**values | words | {"timing": timing})


def timing_values(timing: Timing | None) -> dict[str, float | int | None]:
    """Return a timing as values of a row."""
    return dict.fromkeys(_TIMING) if timing is None else asdict(timing)


def sha256(text: str) -> str:
    """Return the hexadecimal SHA-256 of `text` as UTF-8, which identifies a trace."""
    return hashlib.sha256(text.encode()).hexdigest()


def check_trace(trace: str) -> None:
    """Raise InvalidArgument unless `trace` is JSON text."""
    try:
        json.loads(trace)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"a trace must be JSON text ({error}); serialise the schedule first") from error


def check_verdict(verdict: Verdict) -> None:
    """Raise InvalidArgument for impossible figures, or a right candidate without any."""
    if verdict.outcome is Outcome.RIGHT and verdict.timing is None:
        raise InvalidArgument("a right candidate has no timing; time it before it is recorded")
    if verdict.timing is not None:
        check_timing(verdict.timing)


def check_figures(**figures: float | None) -> None:
    """Raise InvalidArgument for a figure that is negative or no number; None is none."""
    for name, figure in figures.items():
        if figure is not None and not (math.isfinite(figure) and figure >= 0):
            raise InvalidArgument(f"{name} of {figure} cannot be; give a number that is not negative")


def check_timing(timing: Timing) -> None:
    """Raise InvalidArgument for impossible times."""
    times = (timing.low_s, timing.median_s, timing.high_s)
    if not all(math.isfinite(time) and time > 0 for time in times) or list(times) != sorted(times):
        raise InvalidArgument(f"times {times} s cannot be; they must be positive and low <= median <= high")
    if not 1 <= timing.repeats < 1 << 31:
        raise InvalidArgument(f"{timing.repeats} repeats cannot be; at least 1 is needed")
    ratio = timing.yardstick_ratio
    if ratio is not None and not (math.isfinite(ratio) and ratio > 0):
        raise InvalidArgument(f"yardstick ratio {ratio} cannot be; it must be positive")
