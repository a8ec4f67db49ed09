"""What an inference does between its inputs and its outputs, bound once and replayed.

A batch enqueues launches and copies without waiting for the host; a call runs a NumPy function, or a part of
the model in the CPU engine, between two batches.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from honed.runtime.compiled import hostrules
from honed.runtime.compiled.model import Buffer, HostCall

from . import hostcalls
from .cpuparts import OpenParts
from .enqueue import Chunk, Command, handle
from .memory import DeviceMemory
from .timing import Called, Enqueued, Timeline

Array = NDArray[Any]
CHUNK = 64  # commands between two flushes, so that the device starts while the host still enqueues


class Segment(Protocol):
    """A part of an inference, bound to a queue."""

    def run(self) -> Sequence[Any]:
        """Do it and give the events to check at the end."""

    def run_timed(self, timeline: Timeline) -> Sequence[Any]:
        """Do it in the timeline's queue and note when."""


class LaunchBatch:
    """Commands that run in order; at most `cap` of them are queued at once where `cap` is not 0."""

    def __init__(self, commands: Sequence[Command], cap: int, queue: Any) -> None:
        size = min(CHUNK, max(1, cap // 2)) if cap else CHUNK
        self._window = cap // size if cap else 0  # chunks in flight; 0: any number
        self.chunks = [commands[i : i + size] for i in range(0, len(commands), size)]
        self._bound = [Chunk(chunk, queue) for chunk in self.chunks]

    def run(self) -> Sequence[Any]:
        """Enqueue all; the events are the last of each chunk."""
        tails: list[Any] = []
        for chunk in self._bound:
            self._wait(tails)
            tails.append(chunk.enqueue())
        return tails

    def run_timed(self, timeline: Timeline) -> Sequence[Any]:
        """The same with an event each."""
        into = handle(timeline.queue)
        events: list[Any] = []
        tails: list[Any] = []
        for chunk in self.chunks:
            self._wait(tails)
            for command in chunk:
                began = time.perf_counter()
                events.append(command.enqueue(into))
                timeline.device.append(Enqueued(command.kernel, events[-1], began, time.perf_counter()))
            tails.append(events[-1])
            timeline.queue.flush()
        return events

    def _wait(self, tails: Sequence[Any]) -> None:
        """Until another chunk may be queued after those that end with `tails`."""
        if self._window and len(tails) >= self._window:
            tails[-self._window].wait()


class _Call(ABC):
    """A host call: waits for the device, computes, hands its outputs back."""

    def __init__(self, step: HostCall, memory: DeviceMemory, queue: Any) -> None:
        self._step = step
        self._memory = memory
        self._queue = queue

    @abstractmethod
    def _computed(self, values: Sequence[Array]) -> Sequence[Array]:
        """The outputs."""

    def run(self) -> Sequence[Any]:
        """Raises InvalidArgument where its inputs are none for it."""
        self._call(self._queue)
        return ()

    def run_timed(self, timeline: Timeline) -> Sequence[Any]:
        """Raises as `run` does."""
        began = self._call(timeline.queue)
        timeline.host.append(Called(self._step.function, began, time.perf_counter()))
        return ()

    def _call(self, queue: Any) -> float:
        """Do it; when the device was waited for, by time.perf_counter."""
        step = self._step
        with self._memory.read(queue, step.inputs) as values:
            began = time.perf_counter()
            results = self._computed(values)
            for index, result in zip(step.outputs, results, strict=True):
                with self._memory.written(queue, index) as target:
                    target[...] = result
        return began


class BoundHostCall(_Call):
    """A NumPy function; an index among its inputs that points outside the data is refused."""

    def __init__(self, step: HostCall, buffers: Sequence[Buffer], memory: DeviceMemory, queue: Any) -> None:
        super().__init__(step, memory, queue)
        self._outputs = [hostrules.Signature(buffers[i].dtype, buffers[i].shape) for i in step.outputs]

    def _computed(self, values: Sequence[Array]) -> Sequence[Array]:
        return hostcalls.run(self._step.function, values, self._outputs, self._step.attrs)


class BoundPart(_Call):
    """A part of the model in the CPU engine."""

    def __init__(self, step: HostCall, parts: OpenParts, memory: DeviceMemory, queue: Any) -> None:
        super().__init__(step, memory, queue)
        self._parts = parts
        self._part = hostrules.integer(step.attrs, "part")
        wanted = step.attrs["wanted"]
        assert isinstance(wanted, tuple)
        self._wanted = wanted

    def _computed(self, values: Sequence[Array]) -> Sequence[Array]:
        found = self._parts.run(self._part, values)
        return [found[index] for index in self._wanted]
