"""Ways of putting an inference's launches and copies into a queue; each is called without arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from honed.machine.opencl import cl, context
from honed.runtime.compiled.model import HostCall
from honed.runtime.execution import segments
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.segments import CHUNK, Command, LaunchBatch, call_all, handle

from .recorded import VERSION, Recording, version

Way = Callable[[], object]
HONED, PYOPENCL, DRIVER, CALLS, REPLAYED = "honed", "pyopencl", "driver", "empty calls", "replayed"
_LEAST_BYTES = 64  # OpenCL has no buffer of 0 bytes


class WithPyopencl:
    """A batch as pyopencl enqueues it, with an event object each."""

    def __init__(self, commands: list[Command], queue: Any) -> None:
        self._queue = queue
        plain = [_with_pyopencl(command) for command in commands]
        self._chunks = [plain[i : i + CHUNK] for i in range(0, len(plain), CHUNK)]

    def run(self) -> list[Any]:
        """Enqueue all; the last events of each chunk."""
        tails = []
        for chunk in self._chunks:
            for enqueue, first, second, third in chunk:
                event = enqueue(self._queue, first, second, third)
            tails.append(event)
            self._queue.flush()
        return tails


def commands_of(executor: Executor) -> list[Command]:
    """What an inference enqueues, in order; host calls are left out."""
    batches = [segment for segment in executor._segments if isinstance(segment, LaunchBatch)]
    return [command for batch in batches for chunk in batch.chunks for command in chunk]


def ways(executor: Executor) -> dict[str, Way]:
    """By name; "replayed" only where the device can record commands as `recorded` does."""
    commands, queue = commands_of(executor), executor._queue
    batches = [segment for segment in executor._segments if isinstance(segment, LaunchBatch)]
    before = WithPyopencl(commands, queue)
    found: dict[str, Way] = {
        PYOPENCL: before.run,
        HONED: lambda: [batch.run() for batch in batches],
        DRIVER: _bare(queue, commands),
        "driver, with events": _with_events(queue, commands),
        "driver, flushed each": _flushed(queue, commands),
        "driver, one kernel": _bare(queue, [commands[0]] * len(commands)),
        "driver, no arena": _bare(queue, _apart(executor, commands)),
        CALLS: _empty_calls(queue, commands),
    }
    if version(executor.device.cl) == VERSION:
        found[REPLAYED] = Recording(executor.device.cl, queue, commands).replay
    return found


def _with_pyopencl(command: Command) -> tuple[Any, Any, Any, Any]:
    """A function of pyopencl, and what it takes after the queue."""
    if command.kernel is None:
        return _copy, *command.owners, command.args[4].value
    return cl.enqueue_nd_range_kernel, *command.owners, tuple(command.args[3]), tuple(command.args[4])


def _copy(queue: Any, source: Any, target: Any, nbytes: int) -> Any:
    return cl.enqueue_copy(queue, target, source, byte_count=nbytes)


def _bare(queue: Any, commands: list[Command]) -> Way:
    """Nothing but the driver's calls."""
    return _calling([command.call(handle(queue))[:2] for command in commands], commands)


def _calling(calls: list[tuple[Any, tuple[Any, ...]]], owners: object) -> Way:
    def way(_keep: object = owners) -> None:
        for function, args in calls:
            function(*args)

    return way


def _with_events(queue: Any, commands: list[Command]) -> Way:
    """The driver's calls with an event each, let go at the end."""
    into = handle(queue)
    return lambda: [command.enqueue(into) for command in commands]


def _flushed(queue: Any, commands: list[Command]) -> Way:
    calls = [command.call(handle(queue)) for command in commands]

    def way() -> None:
        for call in calls:
            call_all([call])
            queue.flush()

    return way


def _empty_calls(queue: Any, commands: list[Command]) -> Way:
    """What calling costs in Python: a function of C that does nothing, with a launch's arguments."""
    nothing = ctypes.PyDLL(None).abs
    return _calling([(nothing, command.call(handle(queue))[1]) for command in commands], commands)


def _apart(executor: Executor, commands: list[Command]) -> list[Command]:
    """The same commands on scratch buffers that are allocations of their own, not parts of one arena."""
    model = executor.model
    buffers = [
        cl.Buffer(context(executor.device.cl), cl.mem_flags.READ_WRITE, max(described.nbytes, _LEAST_BYTES))
        if described.place == "scratch"
        else kept
        for described, kept in zip(model.buffers, executor._memory.buffers, strict=True)
    ]
    program = cl.kernel_info.PROGRAM
    built: Any = {c.kernel: c.owners[0].get_info(program) for c in commands if c.kernel is not None}
    memory: Any = SimpleNamespace(buffers=buffers)
    bound = [
        segments.command(model, built, memory, step)
        for step in model.steps
        if not isinstance(step, HostCall) and not segments.empty(model, step)
    ]
    return [replace(command, owners=(*command.owners, *buffers)) for command in bound]  # kernels hold none
