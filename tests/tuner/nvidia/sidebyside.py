"""Kernels and cuBLAS in turns, in one process on one GPU."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
import torch  # type: ignore[import-not-found, unused-ignore]

from honed.machine import devices
from honed.machine.opencl import Calls, context, handle
from honed.runtime.execution.segments import Command
from honed.tuner.measure import timing
from honed.tuner.measure.candidate import Candidate

_ROUND_SECONDS = 0.02  # of launches in one turn
_ALONE = 64  # launches timed one by one
# Keeps the device busy for some 7 ms, while the host enqueues what is timed: a launch takes it up to 10 us.
_HOLD = "__kernel void hold(__global float *x) { for (int i = 0; i < 3000000; i++) *x = *x * 0.999f + 1.0f; }"
_HELD = 200  # launches at most that are enqueued meanwhile

Prepared = list[tuple[Any, tuple[int, int, int], tuple[int, int, int]]]  # kernel, work-groups, their size


@dataclass(frozen=True)
class Times:
    """Seconds of one product: medians over turns, from the first launch's start to the last one's end."""

    cublas: float
    kernels: dict[str, float]
    alone: dict[str, float]  # medians of single launches, without what lies between them


class OpenCLDense:
    """Candidates for one product on buffers of their own."""

    def __init__(self, spec: str, shape: tuple[int, int, int]) -> None:
        self.context = context(devices.select(spec).cl)
        profiling = cl.command_queue_properties.PROFILING_ENABLE
        self.queue = cl.CommandQueue(self.context, properties=profiling)
        self.hold = cl.Kernel(cl.Program(self.context, _HOLD).build(), "hold")
        m, n, k = shape
        rng = np.random.default_rng(7)
        self.a = rng.standard_normal((m, k)).astype(np.float32)
        self.b = rng.standard_normal((k, n)).astype(np.float32)
        copy = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        self.buffers = [
            cl.Buffer(self.context, copy, hostbuf=self.a),
            cl.Buffer(self.context, copy, hostbuf=self.b),
            cl.Buffer(self.context, cl.mem_flags.READ_WRITE, m * n * 4),
        ]
        self.spun = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, 4)
        self.shape = shape

    def prepare(self, candidate: Candidate) -> Prepared:
        """Its launches with arguments set."""
        program = timing.build(self.context, candidate.source)
        inner = [cl.Buffer(self.context, cl.mem_flags.READ_WRITE, v.nbytes) for v in candidate.inner]
        memory = [*self.buffers, *inner]
        made: Prepared = []
        for launch in candidate.launches:
            kernel = cl.Kernel(program, launch.entry)
            kernel.set_args(*(memory[i] for i in launch.args))
            made.append((kernel, launch.grid, launch.block))
        self.buffers.extend(inner)  # kernels do not hold them
        return made

    def seconds(self, launches: Prepared, times: int) -> tuple[float, float]:
        """One product: in a row of at most `times`, and the median one alone, both by the device.

        Only the ends of the row have time stamps, which take 3 us of each launch that has them.
        """
        times = min(times, _HELD // len(launches))
        commands = [Command.launch(0, "product", *launch) for launch in launches]
        into = handle(self.queue)
        *row, _ = [command.call(into) for command in commands] * times
        others = Calls(row)
        self.hold.set_args(self.spun)
        held = cl.enqueue_nd_range_kernel(self.queue, self.hold, (1,), (1,))
        self.queue.flush()
        others.make()
        last = commands[-1].enqueue(into)
        self.queue.finish()
        whole = (last.profile.end - held.profile.end) * 1e-9 / times
        events = [[command.enqueue(into) for command in commands] for _ in range(_ALONE)]
        self.queue.finish()
        alone = statistics.median(sum(e.profile.end - e.profile.start for e in one) * 1e-9 for one in events)
        return whole, alone

    def poison(self) -> None:
        """Forget the last product."""
        m, n, _ = self.shape
        cl.enqueue_fill_buffer(self.queue, self.buffers[2], np.float32(np.nan), 0, m * n * 4)

    def result(self) -> np.ndarray:
        """What the last product left."""
        m, n, _ = self.shape
        out = np.empty((m, n), np.float32)
        cl.enqueue_copy(self.queue, out, self.buffers[2])
        self.queue.finish()
        return out


class CublasDense:
    """cublasSgemm as PyTorch calls it, TF32 off."""

    def __init__(self, a: np.ndarray, b: np.ndarray) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        self.a, self.b = torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()
        self.out = torch.mm(self.a, self.b)

    def seconds(self, times: int) -> float:
        """One product of a captured graph of `times`, so that launching costs no more than it must."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                torch.mm(self.a, self.b, out=self.out)
        graph.replay()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e-3 / times

    def result(self) -> np.ndarray:
        """The product."""
        found: np.ndarray = self.out.cpu().numpy()
        return found


def compare(
    spec: str, shape: tuple[int, int, int], candidates: dict[str, Candidate], turns: int = 9
) -> tuple[Times, dict[str, float]]:
    """Times, and each kernel's largest difference from cuBLAS over cuBLAS's largest value."""
    ours = OpenCLDense(spec, shape)
    theirs = CublasDense(ours.a, ours.b)
    prepared = {name: ours.prepare(candidate) for name, candidate in candidates.items()}
    differences = {}
    expected = theirs.result()
    for name, launches in prepared.items():
        ours.poison()
        ours.seconds(launches, 3)
        differences[name] = float(np.abs(ours.result() - expected).max() / np.abs(expected).max())
    cublas: list[float] = []
    whole: dict[str, list[float]] = {name: [] for name in prepared}
    alone: dict[str, list[float]] = {name: [] for name in prepared}
    once = theirs.seconds(3)
    for _ in range(turns):
        cublas.append(theirs.seconds(max(3, min(500, int(_ROUND_SECONDS / once)))))
        for name, launches in prepared.items():
            first = ours.seconds(launches, 1)[0]
            w, a = ours.seconds(launches, max(3, min(500, int(_ROUND_SECONDS / first))))
            whole[name].append(w)
            alone[name].append(a)
    median = statistics.median
    times = Times(
        median(cublas), {n: median(w) for n, w in whole.items()}, {n: median(a) for n, a in alone.items()}
    )
    return times, differences
