"""A dense layer, tuned by us and by tinygrad's BEAM=2, side by side on one OpenCL device.

`python -m benchmarks.dense --tinygrad PYTHON [--minutes 5]`, where PYTHON is an interpreter with tinygrad
(`python3 -m venv tg && tg/bin/pip install tinygrad==0.14.0 numpy`). Each side searches [192,512] x [512,512]
in fp32 for at least this time: tinygrad's beam ends earlier, so it is run repeatedly with the cache off, and
the fastest kernel of all runs counts. Then both kernels, and our default schedule, are checked against NumPy
and run in turns in one process: device time by events and the time that a host waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
from tvm import te, topi

import honed.tuner
from honed.machine import devices
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.lower.target import target_for

M, N, K = 192, 512, 512
GFLOP = 2 * M * N * K / 1e9
# Runs in the interpreter with tinygrad: one beam search, which prints its kernel and launch.
CHILD = f"""
import json, sys, time
import numpy as np
from tinygrad import Tensor
from tinygrad.runtime import ops_cl

seen = []
make, call = ops_cl.CLProgram.__init__, ops_cl.CLProgram.__call__

def made(self, device, obj):
    make(self, device, obj)
    self.reported = dict(source=obj.lib.decode(), name=obj.name, slots=[s[1] for s in self.signature])

def called(self, *bufs, global_size=(1, 1, 1), local_size=None, **more):
    seen.append(dict(self.reported, grid=[int(x) for x in global_size],
        block=[int(x) for x in local_size] if local_size else None))
    return call(self, *bufs, global_size=global_size, local_size=local_size, **more)

ops_cl.CLProgram.__init__, ops_cl.CLProgram.__call__ = made, called
rng = np.random.default_rng(0)
a = Tensor(rng.standard_normal(({M}, {K}), dtype=np.float32)).realize()
b = Tensor(rng.standard_normal(({K}, {N}), dtype=np.float32)).realize()
begun = time.monotonic()
c = a.matmul(b).realize()
seconds = time.monotonic() - begun
chosen = seen[-1]
print(json.dumps(dict(chosen, seconds=seconds, tried=len(seen))))
"""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A source and its launches as (entry, buffers of (c, a, b) by place, global, local)."""

    title: str
    source: str
    launches: tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None], ...]


def of_tinygrad(interpreter: str, seconds: float) -> list[Kernel]:
    """Return the kernels that beam searches chose, repeated for `seconds`."""
    kernels, spent, runs = [], 0.0, 0
    environment = os.environ | {"DEV": "CL", "BEAM": "2", "IGNORE_BEAM_CACHE": "1", "CACHELEVEL": "0"}
    environment.pop("PYTHONPATH", None)
    while spent < seconds:
        begun = time.monotonic()
        done = subprocess.run(
            [interpreter, "-c", CHILD], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        spent, runs = spent + time.monotonic() - begun, runs + 1
        reported = json.loads(done.stdout.splitlines()[-1])
        block = tuple(reported["block"]) if reported["block"] else None
        sizes = tuple(reported["grid"])
        if block:
            sizes = tuple(g * b for g, b in zip(sizes, block, strict=True))
        launch = (reported["name"], tuple(reported["slots"]), sizes, block)
        kernels.append(Kernel(title="tinygrad", source=reported["source"], launches=(launch,)))
        print(
            f"tinygrad: beam search {runs} took {reported['seconds']:.0f} s, {spent:.0f} s in all",
            file=sys.stderr,
        )
    return kernels


def of_ours(title: str, lowered: Lowered) -> Kernel:
    """Return our kernel; its parameters are a, b and c."""
    place = {0: 1, 1: 2, 2: 0}
    launches = tuple(
        (
            launch.entry,
            tuple(place[index] for index in launch.args),
            tuple(g * b for g, b in zip(launch.grid, launch.block, strict=True)),
            tuple(launch.block),
        )
        for launch in lowered.launches
    )
    return Kernel(title=title, source=lowered.source, launches=launches)


class Bench:
    """Buffers and a queue on the device; everything is run in turns."""

    def __init__(self, device: Any) -> None:
        rng = np.random.default_rng(1)
        self.context = cl.Context([device])
        profiling = cl.command_queue_properties.PROFILING_ENABLE
        self.queue = cl.CommandQueue(self.context, properties=profiling)
        self.a = rng.standard_normal((M, K), dtype=np.float32)
        self.b = rng.standard_normal((K, N), dtype=np.float32)
        flags = cl.mem_flags
        self.out = np.empty((M, N), np.float32)
        self.buffers = (
            cl.Buffer(self.context, flags.READ_WRITE, self.out.nbytes),
            *(cl.Buffer(self.context, flags.COPY_HOST_PTR, hostbuf=x) for x in (self.a, self.b)),
        )

    def ready(self, kernel: Kernel) -> Callable[[], tuple[float, float]]:
        """Build and check; return a function that runs it once, and returns seconds on device and host."""
        program = cl.Program(self.context, kernel.source).build()
        bound = []
        for entry, places, sizes, block in kernel.launches:
            made = cl.Kernel(program, entry)
            made.set_args(*(self.buffers[place] for place in places))
            bound.append((made, sizes, block))

        def run() -> tuple[float, float]:
            begun = time.perf_counter()
            events = [cl.enqueue_nd_range_kernel(self.queue, *each) for each in bound]
            events[-1].wait()
            host = time.perf_counter() - begun
            return (events[-1].profile.end - events[0].profile.start) * 1e-9, host

        cl.enqueue_fill_buffer(self.queue, self.buffers[0], np.float32(np.nan), 0, self.out.nbytes)
        run()
        cl.enqueue_copy(self.queue, self.out, self.buffers[0])
        np.testing.assert_allclose(self.out, self.a @ self.b, rtol=1e-3, atol=1e-3)
        return run

    def turns(self, kernels: list[Kernel], runs: int) -> list[tuple[float, float]]:
        """Return median seconds on the device and on the host, for each kernel."""
        functions = [self.ready(kernel) for kernel in kernels]
        times: list[list[tuple[float, float]]] = [[] for _ in kernels]
        for _ in range(runs):
            for function, taken in zip(functions, times, strict=True):
                taken.append(function())
        return [tuple(statistics.median(each) for each in zip(*taken, strict=True)) for taken in times]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tinygrad", required=True, help="a Python interpreter with tinygrad")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cache-dir", type=Path, help="folder with measured peaks")
    args = parser.parse_args()
    device = devices.select(None)
    a, b = te.placeholder((M, K), name="a"), te.placeholder((K, N), name="b")
    dense = te.create_prim_func([a, b, topi.matmul(a, b)])
    begun = time.monotonic()
    tuned = honed.tuner.tune_function(
        dense, name="dense", trials=None, seconds=args.minutes * 60, cache_dir=args.cache_dir
    )
    spent = time.monotonic() - begun
    print(f"honed: {tuned.trials} trials in {spent:.0f} s, refused: {tuned.failures or 'none'}")
    _, default, _ = default_kernels(dense, "dense", target_for(device.profile), device.profile)
    others = of_tinygrad(args.tinygrad, max(spent, args.minutes * 60))
    bench = Bench(device.cl)
    rough = bench.turns(others, 50)
    best = others[min(range(len(others)), key=lambda n: rough[n][0])]
    kernels = [of_ours("default schedule", default), of_ours("honed, tuned", tuned.lowered), best]
    times = bench.turns(kernels, 400)
    print(f"dense [{M},{K}] x [{K},{N}] fp32 on {device.profile.identity.name}; {len(others)} beam searches")
    for kernel, (seconds, host) in zip(kernels, times, strict=True):
        rate = GFLOP / seconds
        print(f"{kernel.title:18s} {seconds * 1e6:8.1f} us, {rate:6.1f} GFLOP/s; host {host * 1e6:8.1f} us")
    (_, _), (ours, ours_host), (theirs, theirs_host) = times
    print(f"tinygrad / honed   {theirs / ours:.2f} on the device, {theirs_host / ours_host:.2f} for the host")


if __name__ == "__main__":
    main()
