"""pyopencl, and its errors as honed's: the one place that imports it."""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from honed.protocol.errors import DeviceError

try:
    import pyopencl as cl
except ImportError as error:
    raise DeviceError(
        f"pyopencl cannot be imported ({error}); install it (apt install python3-pyopencl) to run models here"
    ) from error

# Some compilers remark on every kernel they build; what fails raises.
warnings.filterwarnings("ignore", category=cl.CompilerWarning)

__all__ = [
    "DOTS_EXTENSION",
    "LOADER",
    "accelerates_dots",
    "cl",
    "context",
    "driver_call",
    "event_seconds",
    "failure",
    "most_work_items",
    "refused",
]

# The loader that pyopencl itself calls, wherever it came with it: found through what pyopencl's own library
# is linked to. The interpreter's lock is kept during a call, as pyopencl keeps it while it enqueues.
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
    """Return whether a pyopencl device computes `dot_acc_sat_4x8packed_ss_int` by instructions of its own.

    The driver answers that for each product, so that one that writes them out as shifts and products is not
    taken for one that has them. The first version of the extension has no such answer: there the extension
    itself is the answer.
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

    For a kernel that was compiled for this size, these are the work-items of the size itself: NVIDIA's driver
    reports 256 even then. Raises pyopencl's errors.
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
    return refused(doing, routine, code)


def refused(doing: str, routine: str, code: int) -> DeviceError:
    """Return the DeviceError for an error code of one of the driver's routines."""
    name = cl.status_code.to_string(code, "unknown error %d")
    return DeviceError(f"the OpenCL driver could not {doing} ({routine}: {name}, {code}); see `hone doctor`")


def event_seconds(event: Any) -> float:
    """Return the seconds that a profiled command ran, by the device's clock.

    Raises DeviceError unless it is complete and did not end before it started.
    """
    status = event.command_execution_status
    if status != cl.command_execution_status.COMPLETE:
        raise DeviceError(f"a command did not complete (its status is {status}); see `hone doctor`")
    start, end = event.profile.start, event.profile.end
    if end < start:
        raise DeviceError(f"the device's clock runs backwards ({start} to {end} ns); update its driver")
    return float(end - start) * 1e-9
