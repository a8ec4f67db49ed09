"""Launches and copies as calls of the driver's own functions, every argument bound beforehand.

pyopencl makes an event for every launch. Here a launch has one only where it is asked for, and between two
launches Python does nothing but take the next call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from honed.machine.opencl import LOADER, cl, refused

Call = tuple[Any, tuple[Any, ...], str]  # a function of the driver, all its arguments, and what for
_launch = LOADER.clEnqueueNDRangeKernel
_copy = LOADER.clEnqueueCopyBuffer


@dataclass(frozen=True, slots=True)
class Command:
    """`function(queue, *args, 0, None, event)` enqueues it; both of OpenCL's have that form.

    `args` are values of C. `kernel` is the model's kernel number, None for a copy and for kernels of the
    runtime's own.
    """

    function: Any
    args: tuple[Any, Any, Any, Any, Any]
    kernel: int | None
    doing: str  # for errors
    owners: tuple[Any, ...]  # pyopencl's objects that the driver's are freed with

    @staticmethod
    def launch(
        kernel: int | None, name: str, bound: Any, grid: tuple[int, int, int], block: tuple[int, int, int]
    ) -> Command:
        """Launch the kernel `name`: a pyopencl Kernel that has its arguments."""
        sizes = ctypes.c_size_t * 3
        items = sizes(*(groups * size for groups, size in zip(grid, block, strict=True)))
        args = (handle(bound), ctypes.c_uint(3), None, items, sizes(*block))
        return Command(_launch, args, kernel, f"launch kernel {name!r}", (bound,))

    @staticmethod
    def copy(source: Any, target: Any, nbytes: int) -> Command:
        """Copy the first `nbytes` of one pyopencl buffer to another."""
        start = ctypes.c_size_t(0)
        args = (handle(source), handle(target), start, start, ctypes.c_size_t(nbytes))
        return Command(_copy, args, None, "copy a tensor", (source, target))

    def call(self, queue: ctypes.c_void_p, event: ctypes.c_void_p | None = None) -> Call:
        """Putting it into a queue, given by its handle; the handle of its event goes to `event`."""
        at = None if event is None else ctypes.byref(event)
        return self.function, (queue, *self.args, 0, None, at), self.doing

    def enqueue(self, queue: ctypes.c_void_p) -> Any:
        """Put it into a queue, given by its handle; its pyopencl Event. Raises DeviceError."""
        event = ctypes.c_void_p()
        call_all([self.call(queue, event)])
        return owned(event)


class Chunk:
    """Commands that are enqueued and flushed together, in one queue; only the last has an event."""

    def __init__(self, commands: Sequence[Command], queue: Any) -> None:
        self._owners = (queue, commands)
        self._event = ctypes.c_void_p()
        into = handle(queue)
        self._calls = [
            *(command.call(into) for command in commands[:-1]),
            commands[-1].call(into, self._event),
            (LOADER.clFlush, (into,), "start what is enqueued"),
        ]

    def enqueue(self) -> Any:
        """Enqueue all; the pyopencl Event of the last. Raises DeviceError."""
        call_all(self._calls)
        return owned(self._event)


def call_all(calls: Sequence[Call]) -> None:
    """Make the calls, as fast as Python can; raises DeviceError at the first that is refused."""
    for function, args, doing in calls:
        code = function(*args)
        if code:
            raise refused(doing, function.__name__, code)


def owned(event: ctypes.c_void_p) -> Any:
    """The pyopencl Event that lets go of an event."""
    return cl.Event.from_int_ptr(event.value, retain=False)


def handle(owner: Any) -> ctypes.c_void_p:
    """The driver's object behind one of pyopencl, which must outlive it."""
    return ctypes.c_void_p(owner.int_ptr)
