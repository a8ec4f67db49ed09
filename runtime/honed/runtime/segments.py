"""What an inference does between its inputs and its outputs, bound once and replayed.

A batch enqueues launches and copies without waiting for the host; a call runs a NumPy function between two
batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import hostcalls, hostrules
from .memory import Memory
from .model import Buffer, HostCall
from .opencl import cl
from .timing import Called, Enqueued, Timeline

CHUNK = 64  # commands between two flushes, so that the device starts while the host still enqueues


class Segment(Protocol):
    """A part of an inference."""

    def run(self, queue: Any, timeline: Timeline | None) -> Sequence[Any]:
        """Do it and give the events to check at the end; a `timeline` needs a profiling queue."""


@dataclass(frozen=True, slots=True)
class Command:
    """`enqueue(queue, *args)` gives an event; `kernel` is the model's kernel number, None for a copy."""

    enqueue: Callable[..., Any]
    args: tuple[Any, Any, Any]
    kernel: int | None

    @staticmethod
    def launch(kernel: int, bound: Any, grid: tuple[int, int, int], block: tuple[int, int, int]) -> Command:
        """Launch a pyopencl Kernel that has its arguments."""
        items = tuple(groups * size for groups, size in zip(grid, block, strict=True))
        return Command(cl.enqueue_nd_range_kernel, (bound, items, block), kernel)

    @staticmethod
    def copy(source: Any, target: Any, nbytes: int) -> Command:
        """Copy the first `nbytes` of one pyopencl buffer to another."""
        return Command(_copy, (source, target, nbytes), None)


class Batch:
    """Commands that run in order; at most `cap` of them are queued at once where `cap` is not 0."""

    def __init__(self, commands: Sequence[Command], cap: int) -> None:
        size = min(CHUNK, max(1, cap // 2)) if cap else CHUNK
        self._window = cap // size if cap else 0  # chunks in flight; 0: any number
        plain = [(c.enqueue, *c.args) for c in commands]
        self._chunks = [plain[i : i + size] for i in range(0, len(plain), size)]
        self._kernels = [c.kernel for c in commands]

    def run(self, queue: Any, timeline: Timeline | None) -> Sequence[Any]:
        """Enqueue all; the events are the last of each chunk."""
        if timeline is not None:
            return self._run_timed(queue, timeline)
        tails: deque[Any] = deque()
        for at, chunk in enumerate(self._chunks):
            if self._window and at >= self._window:
                tails[at - self._window].wait()
            for enqueue, first, second, third in chunk:
                event = enqueue(queue, first, second, third)
            tails.append(event)
            queue.flush()
        return tails

    def _run_timed(self, queue: Any, timeline: Timeline) -> Sequence[Any]:
        kernels, events = iter(self._kernels), []
        tails: list[Any] = []
        for at, chunk in enumerate(self._chunks):
            if self._window and at >= self._window:
                tails[at - self._window].wait()
            for (enqueue, first, second, third), kernel in zip(chunk, kernels, strict=False):
                began = time.perf_counter()
                events.append(enqueue(queue, first, second, third))
                timeline.device.append(Enqueued(kernel, events[-1], began, time.perf_counter()))
            tails.append(events[-1])
            queue.flush()
        return events


class Call:
    """A host call: waits for the device, runs the function, hands its outputs back."""

    def __init__(self, step: HostCall, buffers: Sequence[Buffer], memory: Memory) -> None:
        self._step = step
        self._memory = memory
        self._outputs = [hostrules.Signature(buffers[i].dtype, buffers[i].shape) for i in step.outputs]

    def run(self, queue: Any, timeline: Timeline | None) -> Sequence[Any]:
        """Raises InvalidArgument where an index among its inputs points outside the data."""
        step = self._step
        with self._memory.read(queue, step.inputs) as values:
            start = time.perf_counter()
            results = hostcalls.run(step.function, values, self._outputs, step.attrs)
            for index, result in zip(step.outputs, results, strict=True):
                with self._memory.written(queue, index) as target:
                    target[...] = result
            if timeline is not None:
                timeline.host.append(Called(step.function, start, time.perf_counter()))
        return ()


def _copy(queue: Any, source: Any, target: Any, nbytes: int) -> Any:
    return cl.enqueue_copy(queue, target, source, byte_count=nbytes)
