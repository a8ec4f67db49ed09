"""What is measured: the values that travel from the tuner to its measuring child.

Launches of a candidate that a model prepares are no part of its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from honed.runtime.compiled.model import Buffer, Place
from honed.runtime.compiled.plan import Use
from honed.tuner.lower.preparation import PreparedRoom, prepared_steps
from honed.tuner.lower.program import KernelLaunch, MemoryValue

if TYPE_CHECKING:
    from honed.tuner.lower.opencl import Lowered  # which knows TVM, and the measuring child must not


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A tuning task as the measuring child sees it: its memory, and what its answers must be.

    Parameters are the function's inputs, then its outputs. What depends on `constants` only is prepared, as
    in a model: computed once, outside of what is timed. `folder` holds `S.P.npy` for every set S of inputs
    and every parameter P: drawn inputs, and the outputs an independent path gave for them.
    """

    task: str
    parameters: tuple[MemoryValue, ...]
    outputs: tuple[int, ...]  # which parameters are outputs
    sets: int
    folder: Path
    flops: int
    bytes: int
    tolerance: tuple[float, ...]  # per output, of the largest |reference value|; 0: equal
    constants: tuple[int, ...] = ()  # which parameters are the same in all inferences of a model

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
        """What a schedule was lowered to; `name` is its id."""
        return cls(id=name, source=lowered.source, inner=lowered.inner, launches=lowered.launches)


def prepared_launches(workload: Workload, candidate: Candidate) -> frozenset[int]:
    """The numbers of those that depend on constant parameters only, by the rule of plans."""
    values = (*workload.parameters, *candidate.inner)
    buffers = [_buffer(value, _place(workload, n)) for n, value in enumerate(values)]
    steps = [
        [Use.of(index, kind.access) for index, kind in zip(launch.args, launch.arg_types, strict=True)]
        for launch in candidate.launches
    ]
    room = PreparedRoom(sum(value.nbytes for value in candidate.inner), alignment=1)
    return prepared_steps(steps, buffers, room)


def inference_launches(workload: Workload, candidate: Candidate) -> tuple[KernelLaunch, ...]:
    """The others, which run in each inference."""
    prepared = prepared_launches(workload, candidate)
    return tuple(launch for n, launch in enumerate(candidate.launches) if n not in prepared)


def _place(workload: Workload, index: int) -> Place:
    if index >= len(workload.parameters):
        return "scratch"
    if index in workload.outputs:
        return "output"
    return "constant" if index in workload.constants else "input"


def _buffer(value: MemoryValue, place: Place) -> Buffer:
    return Buffer(dtype=value.dtype, shape=value.shape, place=place, offset=0, nbytes=value.nbytes)
