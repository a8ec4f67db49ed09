"""pyopencl, and its errors as honed's: the one place that imports it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import DeviceError

try:
    import pyopencl as cl
except ImportError as error:
    raise DeviceError(
        f"pyopencl cannot be imported ({error}); install it (apt install python3-pyopencl) to run models here"
    ) from error

# Some compilers remark on every kernel they build; what fails raises.
warnings.filterwarnings("ignore", category=cl.CompilerWarning)

__all__ = ["cl", "context", "driver_call", "failure"]


@functools.cache
def context(device: Any) -> Any:
    """The context of this process on a pyopencl device: one for all models, kept until the process ends."""
    with driver_call("open the device"):
        return cl.Context([device])


@contextmanager
def driver_call(doing: str) -> Iterator[None]:
    """Turns a failing driver call in the block into a DeviceError that says what honed was `doing`."""
    try:
        yield
    except cl.Error as error:
        raise failure(doing, error) from error


def failure(doing: str, error: Any) -> DeviceError:
    """The DeviceError for a pyopencl error: its routine, its code's name and number, and what to do."""
    code = getattr(error, "code", None)
    name = cl.status_code.to_string(code, "unknown error %d") if code is not None else str(error)
    routine = getattr(error, "routine", None) or "a driver call"
    return DeviceError(f"the OpenCL driver could not {doing} ({routine}: {name}, {code}); see `hone doctor`")
