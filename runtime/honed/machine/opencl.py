"""Imports pyopencl, for all of honed, converts its errors to honed's, and repeats calls of the driver fast.

For a repeated call ctypes would make an object of each C value, five for a launch, and a loop in Python would
run bytecode between two calls. `Calls` has ctypes objects made in advance, and iterators in C make the calls.
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby, starmap
from operator import itemgetter, length_hint
from typing import Any

from honed.protocol.errors import DeviceError

try:
    import pyopencl
except ImportError as error:
    raise DeviceError(
        f"pyopencl cannot be imported ({error}); install it (apt install python3-pyopencl) to run models here"
    ) from error

cl: Any = pyopencl  # For all of honed

# Some compilers warn about every kernel they build; failures raise.
warnings.filterwarnings("ignore", category=cl.CompilerWarning)

# The OpenCL loader that pyopencl calls, found through the library that pyopencl links to. PyDLL keeps the
# interpreter's lock during a call, as pyopencl does while it enqueues.
LOADER = ctypes.PyDLL(cl._cl.__file__)

DOTS_EXTENSION = "cl_khr_integer_dot_product"
# CL_DEVICE_INTEGER_DOT_PRODUCT_ACCELERATION_PROPERTIES_4x8BIT_PACKED_KHR, which pyopencl does not know: six
# cl_bool, of which the fourth is accumulating_saturating_signed_accelerated.
_DOTS_ACCELERATED, _OF_FOUR_SIGNED_BYTES = 0x1075, 3


@functools.cache
def context(device: Any) -> Any:
    """Return this process's context on a pyopencl device: one for all models, kept until the process ends."""
    with driver_call("open the device"):
        return cl.Context([device])


def accelerates_dots(device: Any) -> bool:
    """Return whether a pyopencl device has instructions for `dot_acc_sat_4x8packed_ss_int`.

    The driver reports acceleration for each product, so that a driver that emulates it with shifts and
    products does not count. The first version of the extension lacks that query: there the extension itself
    counts.
    """
    if DOTS_EXTENSION not in device.extensions.split():
        return False
    accelerated = (ctypes.c_uint32 * 6)()
    code = LOADER.clGetDeviceInfo(
        ctypes.c_void_p(device.int_ptr),
        _DOTS_ACCELERATED,
        ctypes.c_size_t(ctypes.sizeof(accelerated)),
        accelerated,
        None,
    )
    return code != 0 or accelerated[_OF_FOUR_SIGNED_BYTES] != 0


def most_work_items(built: Any, device: Any, block: tuple[int, int, int]) -> int:
    """Return the most work-items that a built pyopencl Kernel can have in a work-group of size `block`.

    For a kernel compiled for this size, that is the number of work-items in `block`: NVIDIA's driver reports
    256 even then. Raises pyopencl's errors.
    """
    info = cl.kernel_work_group_info
    if tuple(built.get_work_group_info(info.COMPILE_WORK_GROUP_SIZE, device)) == block:
        return math.prod(block)
    return int(built.get_work_group_info(info.WORK_GROUP_SIZE, device))


@contextmanager
def driver_call(doing: str) -> Iterator[None]:
    """Turn a failing driver call in the block into a DeviceError that says what honed was `doing`."""
    try:
        yield
    except cl.Error as error:
        raise failure(doing, error) from error


def failure(doing: str, error: Any) -> DeviceError:
    """Return the DeviceError for a pyopencl error: its routine, its code's name and number, a remedy."""
    code = getattr(error, "code", None)
    routine = getattr(error, "routine", None) or "a driver call"
    if code is None:
        return DeviceError(f"the OpenCL driver could not {doing} ({routine}: {error}); see `hone doctor`")
    return driver_error(doing, routine, code)


def driver_error(doing: str, routine: str, code: int) -> DeviceError:
    """Return the DeviceError for an error code of one of the driver's routines."""
    name = cl.status_code.to_string(code, "unknown error %d")
    return DeviceError(f"the OpenCL driver could not {doing} ({routine}: {name}, {code}); see `hone doctor`")


def event_seconds(event: Any) -> float:
    """Return the seconds that a profiled command ran, by the device's clock.

    Raises DeviceError unless it is complete and its end is not before its start.
    """
    status = event.command_execution_status
    if status != cl.command_execution_status.COMPLETE:
        raise DeviceError(f"a command did not complete (its status is {status}); see `hone doctor`")
    start, end = event.profile.start, event.profile.end
    if end < start:
        raise DeviceError(f"the device's clock runs backwards ({start} to {end} ns); update its driver")
    return float(end - start) * 1e-9


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


@functools.lru_cache(1024)  # Many launches have equal sizes, which then stay in the processor's caches
def sizes(x: int, y: int, z: int) -> Any:
    """Return the argument for an array of three size_t, which nobody may change."""
    return ctypes.byref((ctypes.c_size_t * 3)(x, y, z))
