"""An inference's commands recorded once with cl_khr_command_buffer, and replayed with one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from honed.machine.opencl import LOADER, cl, refused
from honed.runtime.errors import DeviceError
from honed.runtime.execution.segments import Command, handle

EXTENSION = "cl_khr_command_buffer"
VERSION = (0, 9, 0)  # OpenCL-Headers of October 2024 gave its functions more arguments


class Recording:
    """Commands of one queue; replayed one at a time, as each replay ends before the next begins."""

    def __init__(self, device: Any, queue: Any, commands: Sequence[Command]) -> None:
        """Record `commands` for a pyopencl device and queue; raises DeviceError where that cannot be done."""
        if version(device) != VERSION:
            raise DeviceError(f"the device has {version(device)} of {EXTENSION}, not {VERSION}")
        self._owners = (queue, tuple(commands))
        self._functions = _Functions(device.platform)
        error = ctypes.c_int()
        self._queue = handle(queue)
        buffer = self._functions("clCreateCommandBufferKHR", ctypes.c_void_p)(
            1, ctypes.byref(self._queue), None, ctypes.byref(error)
        )
        _check("clCreateCommandBufferKHR", error.value)
        self._buffer = ctypes.c_void_p(buffer)
        self._replay = self._functions("clEnqueueCommandBufferKHR")
        for command in commands:
            self._record(command)
        _check("clFinalizeCommandBufferKHR", self._functions("clFinalizeCommandBufferKHR")(self._buffer))

    def replay(self) -> None:
        """Enqueue all commands again; raises DeviceError."""
        _check("clEnqueueCommandBufferKHR", self._replay(0, None, self._buffer, 0, None, None))

    def close(self) -> None:
        """Let go of the recording; its commands must have ended."""
        _check("clReleaseCommandBufferKHR", self._functions("clReleaseCommandBufferKHR")(self._buffer))

    def _record(self, command: Command) -> None:
        """The queue is in order and so are its commands, without points of synchronisation."""
        launches = command.kernel is not None
        name = "clCommandNDRangeKernelKHR" if launches else "clCommandCopyBufferKHR"
        properties = (None,) if launches else ()
        code = self._functions(name)(self._buffer, None, *properties, *command.args, 0, None, None, None)
        _check(name, code)


def version(device: Any) -> tuple[int, ...] | None:
    """The extension's version of a pyopencl device (0.9.0 as (0, 9, 0)), None where it has it not."""
    if EXTENSION not in device.extensions.split():
        return None
    for found in device.extensions_with_version:
        if found.name == EXTENSION:
            return (found.version >> 22, found.version >> 12 & 0x3FF, found.version & 0xFFF)
    return None


class _Functions:
    """The extension's functions of a platform, by name."""

    def __init__(self, platform: Any) -> None:
        self._platform = handle(platform)
        self._find = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
            ("clGetExtensionFunctionAddressForPlatform", LOADER)
        )

    def __call__(self, name: str, result: Any = ctypes.c_int) -> Any:
        address = self._find(self._platform, name.encode())
        if not address:
            raise DeviceError(f"the driver has no {name}")
        return ctypes.PYFUNCTYPE(result)(address)


def _check(routine: str, code: int) -> None:
    if code != cl.status_code.SUCCESS:
        raise refused("record or replay a command buffer", routine, code)
