"""Host time per enqueued kernel, against a bare loop over prebound pyopencl kernels.

    python tests/runtime/bench_dispatch.py [--launches 628] [--device SPEC] [MODEL.honed ...]

For each `.honed` file it also prints the launches of one inference beside the 834 of case 1 (LightGlue on
another compiler's runtime).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from honed.runtime import devices, load, modelfile
from honed.runtime.executor import Executor
from honed.runtime.model import Launch
from honed.runtime.opencl import cl, context

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.builder import INCREMENT, chain

CASE_LAUNCHES = 834
ROUNDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--launches", type=int, default=628)
    parser.add_argument("--device")
    args = parser.parse_args()
    device = devices.select(args.device)
    print(f"device: {device.spec}")
    with tempfile.TemporaryDirectory() as folder:
        path = chain(args.launches).write(Path(folder) / "chain.honed", device.profile)
        with load(path, device) as executor:
            report(device, executor, args.launches)
    for path in args.models:
        count = sum(isinstance(step, Launch) for step in modelfile.read(path).model.steps)
        print(f"{path.name}: {count} launches per inference; the case's runtime: {CASE_LAUNCHES}")


def report(device: devices.Device, executor: Executor, launches: int) -> None:
    """Print medians over rounds in which both loops take turns, so that other load hits both."""
    queue = cl.CommandQueue(context(device.cl))
    bare = bare_loop(device, queue, launches)
    segments = executor._segments
    x = {"x": np.zeros(8, np.float32)}

    def enqueue() -> None:
        for segment in segments:
            segment.run(executor._queue, None)

    loops: dict[str, list[float]] = {"bare": [], "executor": [], "whole": []}
    for _ in range(ROUNDS):
        loops["bare"].append(timed(bare, queue.finish))
        loops["executor"].append(timed(enqueue, executor._queue.finish))
        loops["whole"].append(timed(lambda: executor.run(x), executor._queue.finish))
    each = {name: median(times) / launches * 1e6 for name, times in loops.items()}
    print(f"bare loop over prebound kernels: {each['bare']:.3f} us of host time per kernel")
    ratio = each["executor"] / each["bare"]
    print(f"executor's enqueueing:           {each['executor']:.3f} us, ratio {ratio:.2f} (at most 1.5)")
    print(f"whole inference, waiting and copying included: {each['whole']:.3f} us per kernel")


def bare_loop(device: devices.Device, queue: Any, launches: int) -> Callable[[], None]:
    """As little as pyopencl allows: kernels with their arguments set, enqueued one after another."""
    program = cl.Program(context(device.cl), INCREMENT).build(cache_dir=False)
    buffers = [cl.Buffer(context(device.cl), cl.mem_flags.READ_WRITE, 64) for _ in range(2)]
    kernels = []
    for i in range(launches):
        kernel = cl.Kernel(program, "increment")
        kernel.set_args(buffers[i % 2], buffers[(i + 1) % 2])
        kernels.append(kernel)

    def loop(keep: list[Any] = buffers) -> None:
        enqueue = cl.enqueue_nd_range_kernel
        for kernel in kernels:
            enqueue(queue, kernel, (8, 1, 1), (8, 1, 1))

    return loop


def timed(loop: Callable[[], object], finish: Callable[[], object]) -> float:
    finish()
    start = time.perf_counter()
    loop()
    taken = time.perf_counter() - start
    finish()
    return taken


if __name__ == "__main__":
    main()
