"""Binds the steps of an inference once, and replays them for each run.

Launches and copies are calls of the driver's own functions, with arguments converted to C in advance.
pyopencl makes an event for every launch; here only commands that need an event have one, and the interpreter
runs no bytecode between two launches. A batch enqueues without waiting for the host; between two batches the
CPU engine runs a partition.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from honed.machine.opencl import (
    LOADER,
    Call,
    Calls,
    ReusedEvent,
    cl,
    driver_call,
    handle,
    own_event,
    size,
    sizes,
)
from honed.protocol.errors import Cancelled
from honed.runtime.compiled.model import CompiledModel, Copy, HostCall, Preparation

from .cpuparts import LoadedPartitions
from .memory import DeviceMemory
from .timing import Timeline

Array = NDArray[Any]
CHUNK = 64  # Commands between two flushes; the device starts on them while the host enqueues more
_SHORT_QUEUE = 2  # Chunks in flight in a long run, so that it can be cancelled
_launch = LOADER.clEnqueueNDRangeKernel
_copy = LOADER.clEnqueueCopyBuffer
_copy_rows = LOADER.clEnqueueCopyBufferRect


@dataclass(frozen=True, slots=True)
class Command:
    """A command that `function(queue, *args, 0, None, event)` enqueues, as of both OpenCL functions used.

    `args` are ctypes arguments made once, since each call would convert C values again. `kernel` is the
    model's kernel number, None for a copy and for kernels of the runtime's own.
    """

    function: Any
    args: tuple[Any, Any, Any, Any, Any]
    kernel: int | None
    doing: str  # Description in errors
    owners: tuple[Any, ...]  # Objects of pyopencl that keep the driver's objects alive

    @staticmethod
    def launch(
        kernel: int | None, name: str, bound: Any, grid: tuple[int, int, int], block: tuple[int, int, int]
    ) -> Command:
        """Return a launch of the kernel `name`; `bound` is a pyopencl Kernel with its arguments set."""
        items = tuple(groups * size for groups, size in zip(grid, block, strict=True))
        args = (handle(bound), 3, None, sizes(*items), sizes(*block))
        return Command(_launch, args, kernel, f"launch kernel {name!r}", (bound,))

    @staticmethod
    def copy(source: Any, target: Any, nbytes: int) -> Command:
        """Return a copy of the first `nbytes` of one pyopencl buffer to another."""
        args = (handle(source), handle(target), size(0), size(0), size(nbytes))
        return Command(_copy, args, None, "copy a tensor", (source, target))

    def call(self, queue: Any, event: Any = None) -> Call:
        """Return the call that enqueues the command into a queue, passed as its handle.

        The driver writes the command's event to the address `event`.
        """
        return self.function, (queue, *self.args, 0, None, event), self.doing

    def enqueue(self, queue: Any) -> Any:
        """Enqueue the command into a queue, passed as its handle, and return its pyopencl Event.

        Raises DeviceError.
        """
        event = ctypes.c_void_p()
        Calls([self.call(queue, ctypes.byref(event))]).make()
        return own_event(event)


class RowCopy:
    """A copy of new rows of one buffer to another, repeated `outer` times; only its position is not bound.

    A row has `row` bytes; each time the source has `made` rows and the target `capacity`. New rows follow
    `capacity` rows in the source; if the source has just `capacity` rows, they follow the present rows there.
    """

    def __init__(
        self, queue: Any, source: Any, target: Any, *, outer: int, row: int, written: int, capacity: int
    ) -> None:
        three = ctypes.c_size_t * 3
        self._owners = (queue, source, target)
        self._row, self._first = row, None if written == capacity else capacity
        self._from, self._to, self._region = three(), three(), three(0, outer, 1)
        moved = map(ctypes.byref, (self._from, self._to, self._region))
        pitches = map(size, (written * row, 0, capacity * row, 0))
        args = (*map(handle, self._owners), *moved, *pitches, 0, None, None)
        self.call: Call = (_copy_rows, args, "append new rows")

    def set(self, rows: int, count: int) -> None:
        """Make `call` append `count` rows to the first `rows`."""
        self._from[0] = self._row * (rows if self._first is None else self._first)
        self._to[0], self._region[0] = self._row * rows, self._row * count


class Chunk:
    """Commands that are enqueued into one queue and flushed together; only the last has an event."""

    def __init__(self, commands: Sequence[Command], queue: Any) -> None:
        self._owners = (queue, commands)
        self._event = ReusedEvent()
        into = handle(queue)
        *others, last = commands
        calls = [*(command.call(into) for command in others), last.call(into, self._event.at)]
        self._calls = Calls([*calls, (LOADER.clFlush, (into,), "start what is enqueued")])

    def enqueue(self) -> ReusedEvent:
        """Enqueue all commands and return the event of the last; the previous enqueue must have ended.

        Raises DeviceError.
        """
        self._event.release()
        self._calls.make()
        return self._event


class RunningNow(threading.local):
    """The cancellation of this thread's run: `ended` says whether its client gave up."""

    ended: Callable[[], bool] | None = None

    def check(self) -> None:
        """Raise Cancelled if the client gave up."""
        if self.ended is not None and self.ended():
            raise Cancelled("the run was ended, as nobody waits for it any more")


running_now = RunningNow()


class LaunchBatch:
    """Commands that run in order; at most `cap` of them are queued at once, 0: any number."""

    def __init__(self, commands: Sequence[Command], cap: int, queue: Any) -> None:
        size = min(CHUNK, max(1, cap // 2)) if cap else CHUNK
        self._window = cap // size if cap else 0  # Chunks in flight, 0: any number
        self.chunks = [commands[i : i + size] for i in range(0, len(commands), size)]
        self._bound = [Chunk(chunk, queue) for chunk in self.chunks]

    def run(self, *, long: bool = False) -> Sequence[Any]:
        """Enqueue all commands and return the events of each chunk's last.

        A `long` run has few chunks in flight at once. Raises Cancelled if the client gave up.
        """
        tails: list[Any] = []
        window = min(self._window or _SHORT_QUEUE, _SHORT_QUEUE) if long else self._window
        for chunk in self._bound:
            self._wait(tails, window)
            running_now.check()
            tails.append(chunk.enqueue())
        return tails

    def run_timed(self, timeline: Timeline) -> Sequence[Any]:
        """Enqueue all commands into the timeline's queue with an event each; return the events."""
        into = handle(timeline.queue)
        events: list[Any] = []
        tails: list[Any] = []
        for chunk in self.chunks:
            self._wait(tails, self._window)
            for command in chunk:
                began = time.perf_counter()
                events.append(command.enqueue(into))
                timeline.add("copy" if command.kernel is None else command.kernel, began, events[-1])
            tails.append(events[-1])
            timeline.queue.flush()
        return events

    def _wait(self, tails: Sequence[Any], window: int) -> None:
        """Wait until another chunk may be in flight beside those with the events `tails`; 0: no limit."""
        if window and len(tails) >= window:
            tails[-window].wait()


class PartitionStep:
    """A partition on the CPU engine: waits for the device, computes, and writes outputs back."""

    def __init__(self, step: HostCall, parts: LoadedPartitions, memory: DeviceMemory, queue: Any) -> None:
        self._step = step
        self._parts = parts
        self._memory = memory
        self._queue = queue
        part, wanted = step.attrs["part"], step.attrs["wanted"]
        assert isinstance(part, int)
        assert isinstance(wanted, tuple)
        self._part, self._wanted = part, wanted

    def run(self, *, long: bool = False) -> Sequence[Any]:
        """Run the partition; raise InvalidArgument if its inputs do not fit it, and Cancelled."""
        running_now.check()
        self._call(self._queue)
        return ()

    def run_timed(self, timeline: Timeline) -> Sequence[Any]:
        """Run the partition and note in `timeline` when it ran; raise as `run` does."""
        began = self._call(timeline.queue)
        timeline.add(self._step.function, began)
        return ()

    def _call(self, queue: Any) -> float:
        """Run the partition; return the time.perf_counter after the wait for the device."""
        step = self._step
        with self._memory.read(queue, step.inputs) as values:
            began = time.perf_counter()
            found = self._parts.run(self._part, values)
            for index, made in zip(step.outputs, self._wanted, strict=True):
                with self._memory.writing(queue, index) as target:
                    target[...] = found[made]
        return began


Segment = LaunchBatch | PartitionStep


def segments(
    model: CompiledModel,
    built: list[Any],
    memory: DeviceMemory,
    queue: Any,
    cap: int,
    parts: LoadedPartitions | None = None,
) -> list[Segment]:
    """Return the steps of an inference as batches of launches and copies, with host calls between them.

    `built` has the pyopencl Program of each kernel of the model, `parts` the partitions that the CPU engine
    runs.
    """
    found: list[Segment] = []
    commands: list[Command] = []
    bound: dict[Preparation, Command] = {}
    for step in model.steps:
        if isinstance(step, HostCall):
            found.append(LaunchBatch(commands, cap, queue))
            assert parts is not None
            found.append(PartitionStep(step, parts, memory, queue))
            commands = []
        elif not empty(model, step):
            if step not in bound:
                bound[step] = command(model, built, memory, step)
            commands.append(bound[step])
    return [*found, LaunchBatch(commands, cap, queue)]


def empty(model: CompiledModel, step: Preparation) -> bool:
    """Return whether a step copies no bytes, which OpenCL has no command for."""
    return isinstance(step, Copy) and model.buffers[step.source].nbytes == 0


def command(model: CompiledModel, built: list[Any], memory: DeviceMemory, step: Preparation) -> Command:
    """Return a launch or copy; a launch has a kernel object of its own, so that its arguments stay set.

    `memory` keeps the buffers.
    """
    if isinstance(step, Copy):
        source, target = memory.buffers[step.source], memory.buffers[step.target]
        return Command.copy(source, target, model.buffers[step.source].nbytes)
    kernel = model.kernels[step.kernel]
    with driver_call(f"bind kernel {kernel.name!r}"):
        bound = cl.Kernel(built[step.kernel], kernel.entry)
        bound.set_args(*(memory.buffers[index] for index in step.buffers))
    return Command.launch(step.kernel, kernel.name, bound, kernel.grid, kernel.block)
