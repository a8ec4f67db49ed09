"""Defines candidates, workloads and limits of a measurement, their runners, and the calls of the children."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from honed.machine.kernellog.story import FaultIncident
from honed.machine.profile import DevicePeaks, DeviceProfile
from honed.process.rpc import Call
from honed.runtime.compiled.model import Buffer, Place
from honed.runtime.compiled.plan import Use
from honed.tuner.lower.plan import prepared_steps
from honed.tuner.lower.program import KernelLaunch, MemoryValue
from honed.tuner.records.rows import Verdict

if TYPE_CHECKING:
    # Imported for types only, because it imports TVM, which the measuring child must not
    from honed.tuner.lower.opencl import Lowered


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A tuning task for the measuring child: its memory, and its expected outputs.

    Parameters are the function's inputs, then its outputs. Launches that depend on `constants` only are
    prepared, as in a model: computed once, outside of the timed runs. `folder` holds `S.P.npy` for every set
    S of inputs and every parameter P: drawn inputs, and the outputs that an independent path computed for
    them.
    """

    task: str
    parameters: tuple[MemoryValue, ...]
    outputs: tuple[int, ...]  # Indices of the parameters that are outputs
    sets: int
    folder: Path
    flops: int
    bytes: int
    tolerance: tuple[float, ...]  # Per output, of the largest |reference value|; 0: equal
    constants: tuple[int, ...] = ()  # Indices of the parameters that are equal in all inferences of a model

    @property
    def half(self) -> bool:
        """Return whether a parameter is float16, so that it may compute at half precision."""
        return any(value.dtype == "float16" for value in self.parameters)

    @property
    def integer(self) -> bool:
        """Return whether no parameter is a floating-point number."""
        return not any(value.dtype.startswith("float") for value in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule of a workload, as kernels. `id` is the SHA-256 of its trace."""

    id: str
    source: str
    inner: tuple[MemoryValue, ...]
    launches: tuple[KernelLaunch, ...]

    @classmethod
    def of(cls, name: str, lowered: Lowered) -> Candidate:
        """Return a candidate of a lowered schedule; `name` is its id."""
        return cls(id=name, source=lowered.source, inner=lowered.inner, launches=lowered.launches)


def prepared_launches(workload: Workload, candidate: Candidate) -> frozenset[int]:
    """Return the numbers of the launches that depend on constant parameters only, by the rule of plans."""
    values = (*workload.parameters, *candidate.inner)
    buffers = [
        Buffer(dtype=v.dtype, shape=v.shape, place=_place(workload, n), offset=0, nbytes=v.nbytes)
        for n, v in enumerate(values)
    ]
    steps = [
        [Use(index, kind.access != "read") for index, kind in zip(launch.args, launch.arg_types, strict=True)]
        for launch in candidate.launches
    ]
    room = sum(value.nbytes for value in candidate.inner)
    return prepared_steps(steps, buffers, room, alignment=1)


def inference_launches(workload: Workload, candidate: Candidate) -> tuple[KernelLaunch, ...]:
    """Return the launches that run in each inference: all but the prepared ones.

    A launch counts its buffers whole even where it reads parts of them; a single launch counts at most the
    bytes of its function.
    """
    prepared = prepared_launches(workload, candidate)
    found = tuple(launch for n, launch in enumerate(candidate.launches) if n not in prepared)
    if len(found) > 1:
        return found
    return tuple(replace(launch, bytes=min(launch.bytes, workload.bytes)) for launch in found)


def _place(workload: Workload, index: int) -> Place:
    if index >= len(workload.parameters):
        return "scratch"
    if index in workload.outputs:
        return "output"
    return "constant" if index in workload.constants else "input"


# Number of cores from which on work on one of them hardly disturbs a device that is the processor.
SPARE_CORES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLimits:
    """Bounds of one measurement; seconds are wall time."""

    start_seconds: float = 60.0  # Time to open the device, build the yardstick and load a workload
    build_seconds: float = 20.0  # Time of the driver's compiler for one candidate
    # Time of one run of all launches. Well below what kernel drivers grant a healthy kernel (panfrost 0.5 s a
    # job, kbase and panthor 2.6 s without progress); a slower candidate is of no use anyway.
    run_seconds: float = 2.0
    host_seconds: float = 30.0  # Time to move and compare the tensors of one run
    # Bytes of all buffers of a candidate; also the growth allowed to the child after its start
    memory_bytes: int = 2 << 30
    builder_bytes: int = 512 << 20  # Growth allowed to a building child after its start
    timing_seconds: float = 0.12  # Time after which no more repeats are begun
    warm_seconds: float = 0.1  # Longest wait for the device's clock to rise
    precision: float = 0.03  # Half the width of the confidence interval, of the median
    max_repeats: int = 40
    # Multiple of the best known time beyond which a candidate is timed only a few times
    give_up_beyond: float = 2.5
    few_repeats: int = 2  # Repeats for a candidate that is clearly slow
    max_queued: int = 256  # Launches per finish, where the device's profile has no cap


# A request may be waiting while the tuner holds the lease: a candidate has tighter limits than one of `hone
# tune`, so that the device is free within CANDIDATE_SECONDS (building, running on three inputs, timing) of a
# revocation.
LEASED = MeasureLimits(build_seconds=5.0, run_seconds=0.7)
CANDIDATE_SECONDS = 10.0


# Called before a candidate is judged: records it, or raises where it must not be tried.
Begin = Callable[[Candidate], None]


class CandidateRunner(Protocol):
    """Judges the candidates of one workload in turn: a device that runs them, or a model of one.

    Not for several threads. Calls may raise DeviceError where the judging itself broke, and may be repeated.
    """

    @property
    def ahead(self) -> int:
        """Number of candidates that `prepare` may have built beside the one being judged.

        0: it does nothing.
        """

    @property
    def rate(self) -> float:
        """Bytes per second that the device moved at the loaded workload's size; 0 if unknown."""

    @property
    def peaks(self) -> DevicePeaks:
        """The device's present peaks."""

    @property
    def spent(self) -> dict[str, float]:
        """Wall seconds of the candidate judged last, by phase."""

    def load(self, workload: Workload) -> None:
        """Judge candidates of `workload` from now on."""

    def prepare(self, candidate: Candidate) -> None:
        """Have a candidate built that will be judged soon."""

    def build(self, candidates: Sequence[Candidate]) -> None:
        """Have candidates built that will be judged soon, the first of them next, where a pool does that."""

    def forget(self) -> dict[str, Verdict]:
        """Cancel the requests of `build` and `prepare`: those candidates are not judged any more.

        Return verdicts by id on candidates that were prepared, and judged before `measure` requested them.
        """

    def measure(self, candidate: Candidate, best: float | None = None) -> Verdict:
        """Return the verdict on a candidate; one far slower than `best` (seconds) may be timed less well."""

    def settle(self) -> None:
        """Wait until faults of the last candidate must be known; `take_faults` then returns them."""

    def take_faults(self) -> list[tuple[str, FaultIncident]]:
        """Return faults found since the last call, with the ids of the candidates they belong to."""

    def close(self) -> None:
        """End the processes that it started."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a candidate, and the device's peaks now.

    `ran_at`: when its first run ended, by time.monotonic; None where there was none. `spent`: wall seconds by
    phase. `must_end`: the child is to be replaced, because it has grown, or the device's state cannot be
    relied on any more.
    """

    verdict: Verdict
    ran_at: float | None
    spent: dict[str, float]
    peaks: DevicePeaks
    must_end: bool


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
