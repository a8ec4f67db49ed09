"""A model's steps as commands, with their kernels' arguments set to the buffers of its memory."""

from __future__ import annotations

from typing import Any

from honed.machine.opencl import cl, driver_call
from honed.runtime.compiled.model import CPU_PART, CompiledModel, Copy, HostCall, Preparation

from .cpuparts import OpenParts
from .enqueue import Command
from .memory import DeviceMemory
from .segments import BoundHostCall, BoundPart, LaunchBatch, Segment


def segments(
    model: CompiledModel,
    built: list[Any],
    memory: DeviceMemory,
    queue: Any,
    cap: int,
    parts: OpenParts | None = None,
) -> list[Segment]:
    """The steps of an inference as segments: runs of launches and copies, with host calls between them.

    `built` has the pyopencl Program of each kernel of the model, `parts` what the CPU engine runs of it.
    """
    found: list[Segment] = []
    commands: list[Command] = []
    bound: dict[Preparation, Command] = {}
    for step in model.steps:
        if isinstance(step, HostCall):
            found.append(LaunchBatch(commands, cap, queue))
            if step.function == CPU_PART:
                assert parts is not None
                found.append(BoundPart(step, parts, memory, queue))
            else:
                found.append(BoundHostCall(step, model.buffers, memory, queue))
            commands = []
        elif not empty(model, step):
            if step not in bound:
                bound[step] = command(model, built, memory, step)
            commands.append(bound[step])
    return [*found, LaunchBatch(commands, cap, queue)]


def empty(model: CompiledModel, step: Preparation) -> bool:
    """Whether it copies no bytes, which OpenCL has no command for."""
    return isinstance(step, Copy) and model.buffers[step.source].nbytes == 0


def command(model: CompiledModel, built: list[Any], memory: DeviceMemory, step: Preparation) -> Command:
    """A launch or copy; a launch has a kernel object of its own, so that its arguments stay set.

    `memory` keeps the buffers.
    """
    if isinstance(step, Copy):
        source, target = memory.buffers[step.source], memory.buffers[step.target]
        return Command.copy(source, target, model.buffers[step.source].nbytes)
    kernel = model.kernels[step.kernel]
    with driver_call(f"bind kernel {kernel.name!r}"):
        bound = cl.Kernel(built[step.kernel], kernel.entry)
        bound.set_args(*(memory.buffers[index] for index in step.buffers))
    return Command.launch(step.kernel, kernel.name, bound, kernel.grid, kernel.block)
