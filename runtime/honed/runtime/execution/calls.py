"""Prepares calls of the OpenCL driver once, and repeats them fast.

ctypes makes an object of each C value in a call, five for a launch, and a loop in Python runs bytecode
between two calls. Here the arguments are ctypes objects made in advance, and iterators in C make the calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby, starmap
from operator import itemgetter, length_hint
from typing import Any

from honed.machine.opencl import LOADER, cl, driver_error

Call = tuple[Any, tuple[Any, ...], str]  # A driver function, its arguments, a description for errors
_EXECUTION_STATUS = 0x11D3  # CL_EVENT_COMMAND_EXECUTION_STATUS


class Calls:
    """Driver calls in order; the memory that their arguments point to must outlive them."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._runs = [
            (function, [args for _, args, _ in run], [doing for *_, doing in run])
            for function, run in ((key, list(found)) for key, found in groupby(calls, itemgetter(0)))
        ]

    def make(self) -> None:
        """Make the calls, without bytecode between those of one function; raise DeviceError if one fails."""
        for function, arguments, doing in self._runs:
            left = iter(arguments)
            code = next(filter(None, starmap(function, left)), 0)
            if code:
                raise driver_error(doing[-1 - length_hint(left)], function.__name__, code)


class ReusedEvent:
    """The event of a command that is enqueued repeatedly; has the attributes of pyopencl's Event used here.

    `at` is the argument for the address that the driver writes it to; call `release` before it writes again.
    """

    def __init__(self) -> None:
        self._event, self._status = ctypes.c_void_p(), ctypes.c_int()
        self.at = ctypes.byref(self._event)
        status = (self._event, _EXECUTION_STATUS, size(4), ctypes.byref(self._status), None)
        self._ask = Calls([(LOADER.clGetEventInfo, status, "describe an event")])
        self._release = LOADER.clReleaseEvent  # Still there when the module's names are gone at exit

    @property
    def command_execution_status(self) -> int:
        """Return the command's status, negative for an error; raise DeviceError if the driver cannot tell."""
        self._ask.make()
        return self._status.value

    def wait(self) -> None:
        """Wait until the command has ended, while other threads run; raise pyopencl's errors."""
        cl.Event.from_int_ptr(self._event.value, retain=True).wait()

    def release(self) -> None:
        """Release the driver's event, if there is one."""
        if self._event.value:
            self._release(self._event)
            self._event.value = None

    def __del__(self) -> None:
        self.release()


def own_event(event: ctypes.c_void_p) -> Any:
    """Return a pyopencl Event that owns a driver's event and releases it."""
    return cl.Event.from_int_ptr(event.value, retain=False)


def handle(owner: Any) -> Any:
    """Return the argument for the driver's object of a pyopencl object, which must outlive it."""
    return ctypes.c_void_p.from_param(owner.int_ptr)


def size(value: int) -> Any:
    """Return the argument for a size_t."""
    return ctypes.c_void_p.from_param(value)  # A pointer is as wide


@lru_cache(1024)  # Many launches have equal sizes, which then stay in the processor's caches
def sizes(x: int, y: int, z: int) -> Any:
    """Return the argument for an array of three size_t, which nobody may change."""
    return ctypes.byref((ctypes.c_size_t * 3)(x, y, z))
