"""Measures the kernels, in a process that may be lost: `python -m benchmarks.board.measuring SPEC FIRST`.

From number FIRST on, prints two lines for each on standard output: its number before it is built, then its
result.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from honed.machine import devices
from honed.machine.devices import Device
from honed.machine.opencl import cl, context, driver_call, event_seconds
from honed.protocol import strict
from honed.protocol.errors import DeviceError
from honed.runtime.execution.programs import OPTIONS

from .kernels import Program, in_turns, load

COMMAND = (sys.executable, "-m", "benchmarks.board.measuring")
_SECONDS = 0.4  # Seconds of runs for one kernel
_LEAST, _MOST = 7, 100  # Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of one kernel: the median and the shortest run by the device's clock, or the failure.

    `differs` is the largest difference of its outputs from those of the task's first schedule, over the
    largest value; None without a schedule to compare with.
    """

    us: float | None = None
    least_us: float | None = None
    runs: int = 0
    differs: float | None = None
    failed: str = ""


def main(spec: str, first: str) -> int:
    """Measure the kernels from number `first` on, and print two lines for each."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # Drivers print
        _measure_all(spec, int(first), out)
    return 0


def _measure_all(spec: str, first: int, out: TextIO) -> None:
    device = devices.select(spec)
    queue = cl.CommandQueue(context(device.cl), properties=cl.command_queue_properties.PROFILING_ENABLE)
    answers: dict[str, list[np.ndarray]] = {}
    for number, program in enumerate(in_turns(load())):
        if number < first:
            continue
        out.write(f"{number}\n")
        try:
            found = _measured(device, queue, program, answers)
        except DeviceError as error:
            found = Measured(failed=str(error))
        out.write(json.dumps(strict.to_plain(found)) + "\n")


def _measured(device: Device, queue: Any, program: Program, answers: dict[str, list[np.ndarray]]) -> Measured:
    if program.half and not device.profile.limits.fp16:
        return Measured(failed="the device computes no halves (cl_khr_fp16)")
    with driver_call(f"build or run a kernel of {program.task}"):
        built = cl.Program(context(device.cl), program.source).build(options=list(OPTIONS), cache_dir=False)
        buffers = [_buffer(queue, program, n) for n in range(len(program.buffers))]
        commands = _commands(built, program, buffers)
        times, end = list[float](), 0.0
        _run(queue, commands)  # Drivers compile at the first launch
        while len(times) < _LEAST or (time.monotonic() < end and len(times) < _MOST):
            end = end or time.monotonic() + _SECONDS
            times.append(_run(queue, commands))
        outputs = [
            _read(queue, program, n, buffer)
            for n, buffer in enumerate(buffers)
            if program.buffers[n].role == "out"
        ]
    expected = answers.setdefault(program.task, outputs)
    return Measured(
        us=statistics.median(times) * 1e6,
        least_us=min(times) * 1e6,
        runs=len(times),
        differs=None if expected is outputs else max(map(distance, outputs, expected)),
    )


def _buffer(queue: Any, program: Program, number: int) -> Any:
    """Return memory with numbers that are the same for all schedules of a task; outputs begin as NaN."""
    about = program.buffers[number]
    if about.role != "in":
        values = np.full(about.elements, np.nan).astype(about.dtype)
    elif about.dtype.startswith("float"):
        rng = np.random.default_rng(number)
        values = rng.uniform(-1, 1, about.elements).astype(np.float32).astype(about.dtype)
    else:
        values = np.zeros(about.elements, about.dtype)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return cl.Buffer(queue.context, flags, hostbuf=values)


def _commands(built: Any, program: Program, buffers: list[Any]) -> list[tuple[Any, Any, Any]]:
    commands = []
    for launch in program.launches:
        kernel = cl.Kernel(built, launch.entry)
        kernel.set_args(*(buffers[n] for n in launch.args))
        size = tuple(groups * items for groups, items in zip(launch.grid, launch.block, strict=True))
        commands.append((kernel, size, launch.block))
    return commands


def _run(queue: Any, commands: list[tuple[Any, Any, Any]]) -> float:
    """Return the seconds of all launches, by the device's clock."""
    events = [cl.enqueue_nd_range_kernel(queue, *command) for command in commands]
    queue.finish()
    return sum(map(event_seconds, events))


def _read(queue: Any, program: Program, number: int, buffer: Any) -> np.ndarray:
    about = program.buffers[number]
    values = np.empty(about.elements, about.dtype)
    cl.enqueue_copy(queue, values, buffer)
    return values


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest expected value; infinite if a value is no number."""
    wide, right = found.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(wide).all() and np.isfinite(right).all()):
        return float("inf")
    return float(np.abs(wide - right).max() / max(np.abs(right).max(), 1e-30))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
