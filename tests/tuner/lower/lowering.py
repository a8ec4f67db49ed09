"""What tests of lowering share: functions made from Relax, and kernels run as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyopencl as cl
from tvm import relax, tirx
from tvm.ir import IRModule

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.opencl import Lowered

Make = Callable[[relax.BlockBuilder, Mapping[str, relax.Var]], relax.Expr]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers, float32."""
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def relax_module(make: Make, inputs: Mapping[str, np.ndarray]) -> IRModule:
    """A Relax module whose main computes what `make` returns of inputs of these types."""
    builder = relax.BlockBuilder()
    given = {n: relax.Var(n, relax.TensorType(v.shape, str(v.dtype))) for n, v in inputs.items()}
    with builder.function("main", list(given.values())):
        with builder.dataflow():
            result = builder.emit_output(make(builder, given))
        builder.emit_func_output(result)
    return builder.get()


def only_function(module: IRModule, profile: DeviceProfile) -> tirx.PrimFunc:
    """The one PrimFunc that a Relax module becomes."""
    (found,) = (f for f in legalize(module, profile)[0].functions.values() if isinstance(f, tirx.PrimFunc))
    return found


Run = tuple[Lowered, Sequence[np.ndarray], Sequence[np.ndarray]]  # with its inputs and outputs


def run_lowered(
    lowered: Lowered, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], device: Device
) -> None:
    """Run the launches in order on buffers of their own; fills `outputs`."""
    run_together([(lowered, inputs, outputs)], device)


def run_together(runs: Sequence[Run], device: Device) -> None:
    """Run several functions, whose names differ, as `run_lowered` does, all built as one program."""
    context = cl.Context([device.cl])
    queue = cl.CommandQueue(context)
    program = cl.Program(context, "\n".join(lowered.source for lowered, _, _ in runs)).build()
    flags = cl.mem_flags
    for lowered, inputs, outputs in runs:
        memory = [
            cl.Buffer(context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=np.ascontiguousarray(v))
            for v in (*inputs, *outputs)
        ]
        memory += [cl.Buffer(context, flags.READ_WRITE, value.nbytes) for value in lowered.inner]
        for launch in lowered.launches:
            kernel = cl.Kernel(program, launch.entry)
            kernel.set_args(*(memory[a] for a in launch.args))
            size = tuple(g * b for g, b in zip(launch.grid, launch.block, strict=True))
            cl.enqueue_nd_range_kernel(queue, kernel, size, launch.block)
        for n, output in enumerate(outputs):
            cl.enqueue_copy(queue, output, memory[len(inputs) + n])
        queue.finish()
