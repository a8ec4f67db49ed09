"""What the measuring child and building children are asked for, and what they answer."""

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
    """Measure candidates of a workload; the answer is the rate at which the device moves as many bytes.

    In bytes per second; `traffic` is that rate where it is known.
    """

    workload: Workload
    traffic: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareCandidate(Call[None]):
    """Build a candidate beside what is measured. This is told, and not answered."""

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
    """The result of a candidate, and the device's peaks now. `worn`: the child has grown and is replaced."""

    examined: Examined
    peaks: DevicePeaks
    worn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureCandidate(Call[Measured]):
    """Examine and time a candidate of the loaded workload; one slower than `give_up` seconds less well."""

    candidate: Candidate
    give_up: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBuilder(Call[None]):
    """Open a device to build for; the child may take `memory_bytes` more then. This is told."""

    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCandidate(Call[None]):
    """Build a candidate, and with a `workload` launch one work-group of each of its kernels."""

    candidate: Candidate
    workload: Workload | None
