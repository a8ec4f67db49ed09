"""Times a launch on the host, and in its driver alone: `python -m benchmarks.launching MODEL...`.

A model is an ONNX file, compiled here as it is first served, or a compiled file. In turns in one process the
executor enqueues an inference, and a loop in C makes the same calls of the driver and nothing else. Prints
medians of the enqueueing thread in microseconds of a launch, and the ratios. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import numpy as np

from honed.machine import devices
from honed.machine.devices import Device
from honed.machine.opencl import LOADER, handle
from honed.runtime import load
from honed.runtime.compiled.model import Copy, HostCall
from honed.runtime.dtypes import dtype
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.segments import CHUNK, LaunchBatch, empty

_LOOP = """\
#include <stddef.h>
typedef const size_t *sizes;
typedef int launching(void *, void *, unsigned, sizes, sizes, sizes, unsigned, void *, void *);
typedef int copying(void *, void *, void *, size_t, size_t, size_t, unsigned, void *, void *);
struct command { void *function, *first, *second; size_t bytes, items[3], block[3]; };
int enqueue(void *queue, const struct command *c, size_t count, size_t chunk, int (*flush)(void *)) {
  int code = 0;
  for (size_t i = 0; i < count && !code; i++, c++) {
    if (c->second) code = ((copying *)c->function)(queue, c->first, c->second, 0, 0, c->bytes, 0, 0, 0);
    else code = ((launching *)c->function)(queue, c->first, 3, 0, c->items, c->block, 0, 0, 0);
    if (!code && ((i + 1) % chunk == 0 || i + 1 == count)) code = flush(queue);
  }
  return code;
}
"""
HONED, DRIVER = "honed", "driver"


class _Command(ctypes.Structure):
    """A launch of the kernel `first`, or a copy to the buffer `second`, as the loop has it."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("items", ctypes.c_size_t * 3),
        ("block", ctypes.c_size_t * 3),
    ]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launching", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--device", help="an OpenCL device's spec (the best there is)")
    parser.add_argument("--turns", type=int, default=200, help="of each (200)")
    options = parser.parse_args()
    device = devices.select(options.device)
    loop = _compiled_loop()
    print("| model | launches | honed, us | driver, us | ratio | honed, processor us | driver | ratio |")
    print("|" + "---|" * 8, flush=True)
    for path in options.models:
        with _loaded(path, device) as executor:
            print(_row(path.stem, executor, loop, options.turns), flush=True)
    return 0


def _loaded(path: Path, device: Device) -> Executor:
    if path.suffix == ".honed":
        return load(path, device)
    from benchmarks.running import first_served, normalised, ready  # Imports of the compiler

    model = normalised(path, device.profile)
    return ready(model, first_served(model, device.profile), device)


def _compiled_loop() -> ctypes._FuncPointer:
    with tempfile.TemporaryDirectory(prefix="honed-launching-") as folder:
        library = Path(folder) / "loop.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
        subprocess.run(command, input=_LOOP.encode(), check=True)
        return ctypes.PyDLL(str(library)).enqueue


def _row(name: str, executor: Executor, loop: ctypes._FuncPointer, turns: int) -> str:
    executor.run({t.name: np.zeros(t.shape, dtype(t.dtype).numpy) for t in executor.model.inputs})
    batches = [each for each in executor._segments if isinstance(each, LaunchBatch)]
    commands = _commands(executor, batches)
    queue = handle(executor._queue)

    def drive() -> None:
        code = loop(queue, commands, ctypes.c_size_t(len(commands)), ctypes.c_size_t(CHUNK), LOADER.clFlush)
        assert code == 0, code

    taken = _in_turns({HONED: lambda: [batch.run() for batch in batches], DRIVER: drive}, executor, turns)
    pairs = zip(taken[HONED], taken[DRIVER], strict=True)
    figures = " | ".join(f"{ours:.2f} | {least:.2f} | {ours / least:.2f}" for ours, least in pairs)
    return f"| {name} | {len(commands)} | {figures} |"


def _commands(executor: Executor, batches: list[LaunchBatch]) -> ctypes.Array[_Command]:
    """Return what an inference enqueues, but for host calls, in order; the executor must outlive it."""
    model = executor.model
    steps = [step for step in model.steps if not isinstance(step, HostCall) and not empty(model, step)]
    bound = [command for batch in batches for chunk in batch.chunks for command in chunk]
    found = (_Command * len(steps))()
    for each, step, command in zip(found, steps, bound, strict=True):
        handles = [owner.int_ptr for owner in command.owners]
        if isinstance(step, Copy):
            each.function = ctypes.cast(LOADER.clEnqueueCopyBuffer, ctypes.c_void_p).value
            each.first, each.second = handles
            each.bytes = model.buffers[step.source].nbytes
            continue
        kernel = model.kernels[step.kernel]
        each.function = ctypes.cast(LOADER.clEnqueueNDRangeKernel, ctypes.c_void_p).value
        each.first = handles[0]
        each.items[:] = [groups * size for groups, size in zip(kernel.grid, kernel.block, strict=True)]
        each.block[:] = kernel.block
    return found


def _in_turns(
    ways: Mapping[str, Callable[[], object]], executor: Executor, turns: int
) -> dict[str, tuple[float, float]]:
    """Return for each way the microseconds of a launch: by the clock, and of the thread's processor time."""
    order = random.Random(0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    executor._queue.finish()
    for _ in range(turns):
        for name, way in order.sample(list(ways.items()), len(ways)):
            began, computed = time.perf_counter(), time.thread_time()
            way()
            computed, ended = time.thread_time() - computed, time.perf_counter()
            executor._queue.finish()
            found[name].append((ended - began, computed))
    wall, processor = ({name: [row[kind] for row in rows] for name, rows in found.items()} for kind in (0, 1))
    scale = 1e6 / executor.launches
    return {name: (scale * median(wall[name]), scale * median(processor[name])) for name in ways}


if __name__ == "__main__":
    raise SystemExit(main())
