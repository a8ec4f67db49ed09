"""Calls of the OpenCL driver that are prepared once and made again and again.

ctypes makes an object of each value of C that a call gets, five for a launch, and a loop in Python runs
bytecode between two calls. Here the arguments are what ctypes would make of them, and iterators in C make the
calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby, starmap
from operator import itemgetter, length_hint
from typing import Any

from honed.machine.opencl import LOADER, cl, refused

Call = tuple[Any, tuple[Any, ...], str]  # A function of the driver, all its arguments, and what for
_EXECUTION_STATUS = 0x11D3  # CL_EVENT_COMMAND_EXECUTION_STATUS


class Calls:
    """Calls in order; what their arguments point to must outlive them."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._runs = [
            (function, [args for _, args, _ in run], [doing for *_, doing in run])
            for function, run in ((key, list(found)) for key, found in groupby(calls, itemgetter(0)))
        ]

    def make(self) -> None:
        """Make them, without bytecode between two of one function; raise DeviceError at the first refused."""
        for function, arguments, doing in self._runs:
            left = iter(arguments)
            code = next(filter(None, starmap(function, left)), 0)
            if code:
                raise refused(doing[-1 - length_hint(left)], function.__name__, code)


class ReusedEvent:
    """The event of a command that is enqueued again and again, as pyopencl's Event for what is asked here.

    `at` is the argument for the place where the driver writes it; `release` must come before it writes again.
    """

    def __init__(self) -> None:
        self._event, self._status = ctypes.c_void_p(), ctypes.c_int()
        self.at = ctypes.byref(self._event)
        status = (self._event, _EXECUTION_STATUS, size(4), ctypes.byref(self._status), None)
        self._ask = Calls([(LOADER.clGetEventInfo, status, "describe an event")])
        self._release = LOADER.clReleaseEvent  # Which outlives the module's names when the process ends

    @property
    def command_execution_status(self) -> int:
        """Return the command's status, negative for an error; raise DeviceError where the driver has none."""
        self._ask.make()
        return self._status.value

    def wait(self) -> None:
        """Wait until the command has ended, while other threads run; raise pyopencl's errors."""
        cl.Event.from_int_ptr(self._event.value, retain=True).wait()

    def release(self) -> None:
        """Let go of the driver's event, if there is one."""
        if self._event.value:
            self._release(self._event)
            self._event.value = None

    def __del__(self) -> None:
        self.release()


def owned(event: ctypes.c_void_p) -> Any:
    """Return a pyopencl Event that owns a driver's event and releases it."""
    return cl.Event.from_int_ptr(event.value, retain=False)


def handle(owner: Any) -> Any:
    """Return the argument for the driver's object behind one of pyopencl, which must outlive it."""
    return ctypes.c_void_p.from_param(owner.int_ptr)


def size(value: int) -> Any:
    """Return the argument for a size_t."""
    return ctypes.c_void_p.from_param(value)  # Which is as wide


@lru_cache(1024)  # Many launches have the same, which then stay in the processor's caches
def sizes(x: int, y: int, z: int) -> Any:
    """Return the argument for an array of three size_t, which is for reading only."""
    return ctypes.byref((ctypes.c_size_t * 3)(x, y, z))
