"""Inputs and outputs of halves, on devices that compute in singles: converted on the device.

NumPy converts one element after the other where it is not built for the processor's own instructions (0.4 ms
for an image of 224 x 224 on the host of an H100, a third of SqueezeNet's inference). OpenCL 1.0 loads and
stores halves everywhere; to compute with them takes cl_khr_fp16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from honed.machine.devices import Device
from honed.machine.opencl import cl
from honed.runtime.compiled.model import Buffer, Place

from . import programs
from .memory import DeviceMemory, Port
from .segments import Command, handle

_GROUP = 64  # work-items; every device of OpenCL 1.2 that honed serves takes as many
_SOURCE = """\
__kernel void widened(__global const half *from, __global float *to, const ulong count) {
  size_t at = get_global_id(0);
  if (at < count) to[at] = vload_half(at, from);
}
__kernel void narrowed(__global const float *from, __global half *to, const ulong count) {
  size_t at = get_global_id(0);
  if (at < count) vstore_half_rte(from[at], at, to);
}
"""


@dataclass(frozen=True, slots=True)
class ConvertedPorts:
    """Ports whose buffers hold what the host sees, and the launches between those and the model's own."""

    ports: tuple[Port, ...]
    launches: tuple[Command, ...] = ()

    def enqueue(self, queue: Any) -> None:
        """Convert all, in order with what `queue` has; raises DeviceError."""
        for launch in self.launches:
            launch.enqueue(handle(queue))


def converted(
    ports: tuple[Port, ...], inwards: bool, memory: DeviceMemory, device: Device, cache_dir: Path | None
) -> ConvertedPorts:
    """Ports of inputs (`inwards`) or outputs, those of halves with buffers of their own where needed.

    Raises pyopencl's errors, and DeviceError where the device cannot build the conversion.
    """
    if not any(_is_half(port) for port in ports):
        return ConvertedPorts(ports)
    program = programs.build(device, _SOURCE, cache_dir)
    found: list[Port] = []
    launches: list[Command] = []
    for port in ports:
        if not _is_half(port):
            found.append(port)
            continue
        elements = math.prod(port.shape)
        place: Place = "input" if inwards else "output"
        index = memory.added(
            Buffer(dtype="float16", shape=port.shape, place=place, offset=0, nbytes=2 * elements)
        )
        buffers = [memory.buffers[index], memory.buffers[port.buffer]]
        launches.append(_launch(program, buffers if inwards else buffers[::-1], inwards, elements))
        found.append(replace(port, buffer=index, held=port.seen))
    return ConvertedPorts(tuple(found), tuple(launches))


def _is_half(port: Port) -> bool:
    return port.seen == np.float16 and port.held == np.float32 and math.prod(port.shape) > 0


def _launch(program: Any, buffers: Iterable[Any], inwards: bool, elements: int) -> Command:
    name = "widened" if inwards else "narrowed"
    kernel = cl.Kernel(program, name)
    kernel.set_args(*buffers, np.uint64(elements))
    return Command.launch(None, name, kernel, (-(-elements // _GROUP), 1, 1), (_GROUP, 1, 1))
