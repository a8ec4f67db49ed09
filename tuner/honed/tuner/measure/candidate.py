"""What is measured, within which limits, and what a session needs of what measures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from honed.machine.kernellog import FaultIncident
from honed.machine.profile import DevicePeaks
from honed.runtime.compiled.model import Buffer, Place
from honed.runtime.compiled.plan import Use
from honed.tuner.lower.plan import prepared_steps
from honed.tuner.lower.program import KernelLaunch, MemoryValue
from honed.tuner.records.verdict import Verdict

if TYPE_CHECKING:
    from honed.tuner.lower.opencl import Lowered  # Which knows TVM, and the measuring child must not


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A tuning task as the measuring child sees it: its memory, and what its answers must be.

    Parameters are the function's inputs, then its outputs. What depends on `constants` only is prepared, as
    in a model: computed once, outside of what is timed. `folder` holds `S.P.npy` for every set S of inputs
    and every parameter P: drawn inputs, and the outputs an independent path gave for them.
    """

    task: str
    parameters: tuple[MemoryValue, ...]
    outputs: tuple[int, ...]  # Which parameters are outputs
    sets: int
    folder: Path
    flops: int
    bytes: int
    tolerance: tuple[float, ...]  # Per output, of the largest |reference value|; 0: equal
    constants: tuple[int, ...] = ()  # Which parameters are the same in all inferences of a model

    @property
    def half(self) -> bool:
        """Whether it may compute at half precision."""
        return any(value.dtype == "float16" for value in self.parameters)

    @property
    def integer(self) -> bool:
        """Whether it has no floating-point numbers at all."""
        return not any(value.dtype.startswith("float") for value in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One schedule of a workload, as kernels. `id` is the SHA-256 of its trace."""

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
        [Use.of(index, kind.access) for index, kind in zip(launch.args, launch.arg_types, strict=True)]
        for launch in candidate.launches
    ]
    room = sum(value.nbytes for value in candidate.inner)
    return prepared_steps(steps, buffers, room, alignment=1)


def inference_launches(workload: Workload, candidate: Candidate) -> tuple[KernelLaunch, ...]:
    """Return the launches that run in each inference: all but the prepared ones.

    A kernel's buffers do not say that it reads parts of them; one alone moves what its function must.
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


# Cores from which on what runs on one of them disturbs a device that is the processor little.
SPARE_CORES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLimits:
    """Bounds of one measurement; seconds are wall time."""

    start_seconds: float = 60.0  # To open the device, build the yardstick and load a workload
    build_seconds: float = 20.0  # Of the driver's compiler, for one candidate
    # One run of all launches. Well below what kernel drivers grant a healthy kernel (panfrost 0.5 s a job,
    # kbase and panthor 2.6 s without progress); a candidate this slow is of no use anyway.
    run_seconds: float = 2.0
    host_seconds: float = 30.0  # To move and compare the tensors of one run
    memory_bytes: int = 2 << 30  # All buffers of a candidate; also what the child may take beyond its start
    builder_bytes: int = 512 << 20  # What a building child may take beyond its start
    timing_seconds: float = 0.12  # After which no more repeats are begun
    warm_seconds: float = 0.1  # At most, until the device's clock is up
    precision: float = 0.03  # Half the width of the confidence interval, of the median
    max_repeats: int = 40
    give_up_beyond: float = 2.5  # Times the best known time: slower than that is timed few times only
    few_repeats: int = 2  # For a candidate that is clearly slow
    max_queued: int = 256  # Launches per finish, where the device's profile has no cap


# Under a lease a request may be waiting: a candidate is bounded more tightly than one of `hone tune`, so that
# the device is left within CANDIDATE_SECONDS (building, running on three inputs, timing) when it is revoked.
LEASED = MeasureLimits(build_seconds=5.0, run_seconds=0.7)
CANDIDATE_SECONDS = 10.0


# Called before a candidate is judged: notes it in the records, or raises where it must not be tried.
Begin = Callable[[Candidate], None]


class CandidateRunner(Protocol):
    """Judges the candidates of one workload after the other: a device that runs them, or a model of one.

    Not for several threads. Calls may raise DeviceError where the judging itself broke, and may be repeated.
    """

    @property
    def ahead(self) -> int:
        """How many candidates `prepare` may have built beside the one being judged; 0: it does nothing."""

    @property
    def rate(self) -> float:
        """Bytes per second that the device was seen to move at the loaded workload's size; 0 if unknown."""

    @property
    def peaks(self) -> DevicePeaks:
        """The device's peaks as they are known now."""

    @property
    def spent(self) -> dict[str, float]:
        """Wall seconds of the candidate judged last, by phase."""

    def load(self, workload: Workload) -> None:
        """Judge candidates of `workload` from now on."""

    def prepare(self, candidate: Candidate) -> None:
        """Have a candidate built that is soon judged."""

    def build(self, candidates: Sequence[Candidate]) -> None:
        """Have candidates built that are judged soon, the first of them next, where a pool does that."""

    def forget(self) -> dict[str, Verdict]:
        """Cancel what `build` and `prepare` were asked for: those candidates are not judged any more.

        Return verdicts by id on candidates that were prepared, and judged before they were asked for.
        """

    def measure(self, candidate: Candidate, best: float | None = None) -> Verdict:
        """Return the verdict on a candidate; one far slower than `best` (seconds) may be timed less well."""

    def settle(self) -> None:
        """Wait until faults of what was judged last must be known; `take_faults` has them then."""

    def take_faults(self) -> list[tuple[str, FaultIncident]]:
        """Return faults found since the last call, with the ids of the candidates they belong to."""

    def close(self) -> None:
        """End its processes."""
