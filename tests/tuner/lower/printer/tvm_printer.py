"""TVM's own OpenCL C printer: the reference that ours is compared with."""

from __future__ import annotations

from unittest import mock

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir.pipeline import finalize_device_passes
from tvm.target import Target

from honed.machine.profile import DeviceProfile
from honed.tuner.lower import opencl


def lower_by_tvm(func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile) -> opencl.Lowered:
    """Lower a scheduled function as `lower_function` does, but print it by TVM."""

    def printed(kernels: dict[str, tirx.PrimFunc], _profile: DeviceProfile) -> str:
        device = finalize_device_passes()(IRModule(kernels))
        return str(tvm.get_global_func("target.build.opencl")(device, target).inspect_source("cl"))

    with mock.patch.object(opencl, "print_kernels", printed):
        return opencl.lower_function(func, name, target, profile)
