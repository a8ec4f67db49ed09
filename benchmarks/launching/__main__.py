"""What the host spends on launches: `python -m benchmarks.launching MODEL...`.

Puts all launches and copies of an inference into the queue, in turns in several ways: with pyopencl as honed
did before (an event each), as honed does, with the driver's calls and nothing else, with calls that do
nothing, and recorded and replayed where the device has cl_khr_command_buffer. Then takes whole inferences
apart, with pyopencl's launches and with honed's, in turns. Models are ONNX files, compiled here with default
rules, or compiled files. Needs no root.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from honed.machine import devices
from honed.machine.devices import Device
from honed.runtime import load
from honed.runtime.dtypes import dtype
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.memory import checked, result, store
from honed.runtime.execution.segments import LaunchBatch

from .recorded import EXTENSION, VERSION, version
from .ways import CALLS, DRIVER, HONED, PYOPENCL, REPLAYED, WithPyopencl, commands_of, ways

Feeds = dict[str, np.ndarray]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launching", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--device", help="an OpenCL device's spec (the best there is)")
    parser.add_argument("--turns", type=int, default=50, help="of each way (50)")
    options = parser.parse_args()
    device = devices.select(options.device)
    for path in options.models:
        with _loaded(path, device) as executor:
            _report(path.stem, executor, options.turns)
    return 0


def _loaded(path: Path, device: Device) -> Executor:
    if path.suffix == ".honed":
        return load(path, device)
    from benchmarks.running import normalised, ready
    from honed.tuner import frontend
    from honed.tuner.lower.module import lower_module

    model = normalised(path, device.profile)
    return ready(model, lower_module(frontend.import_relax(model), device.profile), device)


def _report(name: str, executor: Executor, turns: int) -> None:
    given = {t.name: np.zeros(t.shape, dtype(t.dtype).numpy) for t in executor.model.inputs}
    count, cap = len(commands_of(executor)), executor.device.profile.rules.max_queued_launches
    print(f"\n{name}: {count} launches and copies on {executor.device.spec}, medians of {turns} turns")
    if cap and count > cap:
        print(f"the queue of this device takes {cap}, and only honed waits in between: nothing is compared")
        return
    for _ in range(2):
        executor.run(given)  # some drivers compile at the first launch
    taken = _in_turns(executor, turns)
    print("| enqueued by | us a launch | processor us | until done, us an inference |\n|" + "---|" * 4)
    for way, each in taken.items():
        print(f"| {way} | {each.wall / count:.2f} | {each.processor / count:.2f} | {each.done:.0f} |")
    if REPLAYED not in taken:
        found = version(executor.device.cl)
        print(f"not replayed: {EXTENSION} of this device is {found}, and {VERSION} is wanted")
    driver = (taken[DRIVER].wall - taken[CALLS].wall) / taken[HONED].wall
    print(f"{driver:.0%} of what honed takes to enqueue is the driver's\n")
    print("| an inference, us | inputs | enqueue | wait, outputs | results | whole |\n|" + "---|" * 6)
    for way, parts in _inferences(executor, given, turns).items():
        print(f"| {way} | " + " | ".join(f"{part:.0f}" for part in (*parts, sum(parts))) + " |")
    timed = executor.profile(given)
    print(f"its kernels take {timed.sum_us:.0f} us by the device's clock", flush=True)


@dataclass(frozen=True, slots=True)
class Taken:
    """Microseconds: until all is enqueued, of that the processor time of the thread, until all is done."""

    wall: float
    processor: float
    done: float


def _in_turns(executor: Executor, turns: int) -> dict[str, Taken]:
    found: dict[str, list[tuple[float, float, float]]] = {}
    compared = ways(executor)
    executor._queue.finish()
    order = random.Random(0)
    for _ in range(turns):
        for name, way in order.sample(list(compared.items()), len(compared)):  # who follows whom matters
            began, computed = time.perf_counter(), time.thread_time()
            way()
            computed, enqueued = time.thread_time() - computed, time.perf_counter()
            executor._queue.finish()
            done = time.perf_counter() - began
            found.setdefault(name, []).append((enqueued - began, computed, done))
    return {
        name: Taken(*(1e6 * median(each) for each in zip(*rows, strict=True))) for name, rows in found.items()
    }


@dataclass(slots=True)
class _Clock:
    """Seconds between marks."""

    parts: list[float] = field(default_factory=list)
    last: float = field(default_factory=time.perf_counter)

    def mark(self) -> None:
        now = time.perf_counter()
        self.parts.append(now - self.last)
        self.last = now


def _inferences(executor: Executor, given: Feeds, turns: int) -> dict[str, list[float]]:
    """For pyopencl's launches and honed's the medians of an inference's parts, in microseconds."""
    rows: dict[str, list[list[float]]] = {PYOPENCL: [], HONED: []}
    own = executor._segments
    before: list[Any] = [
        WithPyopencl([command for chunk in segment.chunks for command in chunk], executor._queue)
        if isinstance(segment, LaunchBatch)
        else segment
        for segment in own
    ]
    for _ in range(turns):
        for name, segments in ((PYOPENCL, before), (HONED, own)):
            rows[name].append(_inference(executor, segments, given))
    return {name: [1e6 * median(part) for part in zip(*each, strict=True)] for name, each in rows.items()}


def _inference(executor: Executor, segments: list[Any], given: Feeds) -> list[float]:
    """What the executor does, in parts: inputs, enqueueing, waiting for the outputs, the caller's copies."""
    clock, queue, memory = _Clock(), executor._queue, executor._memory
    values = checked(executor._inputs.ports, given)
    for port, value in zip(executor._inputs.ports, values, strict=True):
        with memory.written(queue, port.buffer) as target:
            store(port, value, target)
    executor._inputs.enqueue(queue)
    clock.mark()
    events = [event for segment in segments for event in segment.run()]
    clock.mark()
    executor._outputs.enqueue(queue)
    with memory.read(queue, tuple(port.buffer for port in executor._outputs.ports)) as held:
        clock.mark()
        for port, array in zip(executor._outputs.ports, held, strict=True):
            result(port, array)
        del events
    clock.mark()
    return clock.parts


if __name__ == "__main__":
    raise SystemExit(main())
