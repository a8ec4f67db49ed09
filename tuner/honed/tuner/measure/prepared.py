"""Which launches of a candidate a model prepares, and so are no part of its time."""

from __future__ import annotations

from honed.runtime.compiled.model import Buffer, Place
from honed.runtime.compiled.plan import Use
from honed.tuner.lower.preparation import PreparedRoom, prepared_steps
from honed.tuner.lower.program import KernelLaunch, MemoryValue

from .candidate import Candidate, Workload


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
