"""TVM's own OpenCL C printer: the reference that ours is compared with."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir.pipeline import finalize_device_passes
from tvm.target import Target


def tvm_printer(target: Target) -> Callable[[dict[str, tirx.PrimFunc]], str]:
    """A printer for `lower_function`."""

    def printed(kernels: dict[str, tirx.PrimFunc]) -> str:
        device = finalize_device_passes()(IRModule(kernels))
        return str(tvm.get_global_func("target.build.opencl")(device, target).inspect_source("cl"))

    return printed
