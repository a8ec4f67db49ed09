"""What kernels take: by the Valhall bench, or on a device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyopencl as cl
from tvm import tirx

from honed.machine import devices
from honed.machine.opencl import context
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.cost import parameters
from honed.tuner.lower.opencl import Lowered
from honed.tuner.measure import bound
from honed.tuner.measure.candidate import Candidate, Workload, inference_launches
from honed.tuner.tune.extract import workload
from honed.tuner.valhall.benches import predicted
from honed.tuner.valhall.compiler import NotBuilt, OfflineCompiler
from honed.tuner.valhall.judge import MachineCodeJudge
from honed.tuner.valhall.machine import LAUNCH_SECONDS

_TURNS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Seconds: `all` launches of an inference, and the longest of them `alone`."""

    all: float
    alone: float


NEVER = Taken(all=math.inf, alone=math.inf)


class Timer(Protocol):
    """What times kernels."""

    profile: DeviceProfile

    def least(
        self, funcs: Sequence[tirx.PrimFunc], kernels: Sequence[Sequence[Lowered]], constant: int
    ) -> list[Taken]:
        """The least of each function's kernels, where one parameter is constant."""


class Bench:
    """A Mali-G610 as it is modelled, with the launch's cost that the model has."""

    def __init__(self, root: Path) -> None:
        self.profile = predicted("mali-g610")
        self._compiler = OfflineCompiler(root)

    def __enter__(self) -> Self:
        self._judge = MachineCodeJudge(self._compiler.__enter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._compiler.close()

    def least(
        self, funcs: Sequence[tirx.PrimFunc], kernels: Sequence[Sequence[Lowered]], constant: int
    ) -> list[Taken]:
        """See `Timer`."""
        begun = [[self._judge.begin(one.source) for one in each] for each in kernels]
        return [
            _least([self._taken(func, one, dump, constant) for one, dump in zip(each, dumps, strict=True)])
            for func, each, dumps in zip(funcs, kernels, begun, strict=True)
        ]

    def _taken(self, func: tirx.PrimFunc, lowered: Lowered, dump: Any, constant: int) -> Taken:
        try:
            judged = self._judge.judge(lowered.source, _launches(func, lowered, constant), dump)
        except NotBuilt:
            return NEVER
        each = [one.packed.seconds + LAUNCH_SECONDS for one in judged]
        return Taken(all=sum(each), alone=max(each))


class Board:
    """An OpenCL device, by its own clock; kernels of all layouts take turns."""

    def __init__(self, spec: str) -> None:
        device = devices.select(spec)
        self.profile = device.profile
        self._context = context(device.cl)
        self._queue = cl.CommandQueue(self._context, properties=cl.command_queue_properties.PROFILING_ENABLE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.finish()

    def least(
        self, funcs: Sequence[tirx.PrimFunc], kernels: Sequence[Sequence[Lowered]], constant: int
    ) -> list[Taken]:
        """See `Timer`. Kernels of one function must agree on their answers."""
        rows = [
            [made for one in each if (made := self._prepared(func, one, constant)) is not None]
            for func, each in zip(funcs, kernels, strict=True)
        ]
        for row in rows:
            _agree([self._answer(one) for one in row])
        times: list[list[list[list[float]]]] = [[[] for _ in row] for row in rows]
        for _ in range(_TURNS):
            for row, into in zip(rows, times, strict=True):
                for one, found in zip(row, into, strict=True):
                    found.append(self._run(one))
        return [_least([_median(found) for found in into]) for into in times]

    def _prepared(self, func: tirx.PrimFunc, lowered: Lowered, constant: int) -> _Bound | None:
        """The kernels on memory of their own; None, and told, where the driver does not build them."""
        rng = np.random.default_rng(1)
        copy = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        memory = []
        for value in parameters(func):
            array = (rng.standard_normal(value.shape) / 8).astype(value.dtype)
            memory.append(cl.Buffer(self._context, copy, hostbuf=array))
        output = np.empty(parameters(func)[-1].shape, parameters(func)[-1].dtype)
        inner = [cl.Buffer(self._context, cl.mem_flags.READ_WRITE, one.nbytes) for one in lowered.inner]
        try:
            program = bound.build(self._context, lowered.source)
        except cl.RuntimeError as refused:
            print(f"left out: {bound.complaint(refused)[:300]}")
            return None
        wanted = _launches(func, lowered, constant)
        made, timed = [], []
        for launch in lowered.launches:
            kernel = cl.Kernel(program, launch.entry)
            kernel.set_args(*((*memory, *inner)[n] for n in launch.args))
            size = tuple(grid * block for grid, block in zip(launch.grid, launch.block, strict=True))
            made.append((kernel, size, launch.block))
            timed.append(any(launch is one for one in wanted))
        return _Bound(made, timed, [*memory, *inner], memory[-1], output)

    def _run(self, one: _Bound) -> list[float]:
        events = [
            cl.enqueue_nd_range_kernel(self._queue, kernel, size, block)
            for (kernel, size, block), timed in zip(one.launches, one.timed, strict=True)
            if timed
        ]
        self._queue.finish()
        return [(event.profile.end - event.profile.start) * 1e-9 for event in events]

    def _answer(self, one: _Bound) -> np.ndarray:
        for kernel, size, block in one.launches:
            cl.enqueue_nd_range_kernel(self._queue, kernel, size, block)
        cl.enqueue_copy(self._queue, one.answer, one.output)
        self._queue.finish()
        return one.answer


@dataclass(frozen=True, slots=True)
class _Bound:
    """Kernels with their arguments, which of them are timed, and the memory that they use."""

    launches: list[tuple[Any, tuple[int, ...], tuple[int, int, int]]]
    timed: list[bool]
    memory: list[Any]
    output: Any
    answer: np.ndarray


def _launches(func: tirx.PrimFunc, lowered: Lowered, constant: int) -> tuple[Any, ...]:
    made: Workload = workload("layer", func, 1, Path(), None, (constant,))
    return inference_launches(made, Candidate.of("", lowered))


def _agree(answers: Sequence[np.ndarray]) -> None:
    for one in answers[1:]:
        np.testing.assert_allclose(one, answers[0], rtol=1e-2, atol=1e-2)


def _median(runs: Sequence[Sequence[float]]) -> Taken:
    each = [statistics.median(launch) for launch in zip(*runs, strict=True)]
    return Taken(all=sum(each), alone=max(each))


def _least(found: Sequence[Taken]) -> Taken:
    return min(found, key=lambda one: one.all, default=NEVER)
