"""The calls of the measuring child and the building children, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field

from honed.machine.profile import DevicePeaks, DeviceProfile
from honed.process.rpc import Call
from honed.tuner.records.verdict import Verdict

from .candidate import Candidate, MeasureLimits, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession(Call[None]):
    """Open a device for good, of which the child may take `limits`; `without` are names of checks."""

    device: str
    profile: DeviceProfile
    limits: MeasureLimits
    without: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWorkload(Call[float]):
    """Measure candidates of a workload; return the rate at which the device moves as many bytes.

    In bytes per second; `traffic` is that rate where it is known.
    """

    workload: Workload
    traffic: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareCandidate(Call[None]):
    """Build a candidate beside the one being measured, as a notification without an answer."""

    candidate: Candidate


@dataclass(slots=True)
class Examined:
    """The result of a candidate.

    `tainted`: the device's state cannot be relied on any more. `ran_at`: when its first run ended, by
    time.monotonic; None where there was none. `spent`: wall seconds by phase.
    """

    verdict: Verdict
    tainted: bool
    ran_at: float | None
    spent: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a candidate, and the device's peaks now.

    `worn`: the child has grown and is to be replaced.
    """

    examined: Examined
    peaks: DevicePeaks
    worn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureCandidate(Call[Measured]):
    """Examine and time a candidate of the loaded workload.

    Take fewer samples if slower than `give_up` seconds.
    """

    candidate: Candidate
    give_up: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBuilder(Call[None]):
    """Open a device to build for; the child may take `memory_bytes` more then.

    A notification without an answer.
    """

    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCandidate(Call[None]):
    """Build a candidate, and with a `workload` launch one work-group of each of its kernels."""

    candidate: Candidate
    workload: Workload | None
