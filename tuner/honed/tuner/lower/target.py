"""Describes OpenCL devices to TVM: the target of a profile, and OpenCL C's names of functions."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.target import Target

from honed.machine.profile import DeviceProfile

from . import DOT


def target_for(profile: DeviceProfile) -> Target:
    """Return an OpenCL target with the profile's limits, and an LLVM host that no code is generated for.

    `thread_warp_size` is 1 because the generator assumes that the lanes of a wider warp run in step, and
    leaves out or misplaces barriers, which OpenCL does not allow (facts: Apache TVM 0.27,
    LowerThreadAllreduce).
    """
    threads = min(profile.rules.max_threads, profile.limits.max_work_group_size)
    config = {
        "kind": "opencl",
        "max_num_threads": threads,
        "max_threads_per_block": threads,
        "max_shared_memory_per_block": profile.limits.local_mem_bytes,
        "thread_warp_size": 1,
    }
    if profile.family.target_device:
        config["device"] = profile.family.target_device
    return Target(config, host={"kind": "llvm"})


def alignment_of(profile: DeviceProfile) -> int:
    """Return the alignment, in bytes, of scratch buffers and of the values in them.

    It suits sub-buffers, and whole cache lines (64 bytes).
    """
    return max(64, profile.limits.base_align_bytes)


# TVM lowers a function that it has no OpenCL rule for to C's name: `tanf` for float32, nothing at all for
# float16. OpenCL C has neither; its names are overloaded for every floating type and for vectors (OpenCL C
# 3.0, 6.15.2).

NAMES = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "hypot", "ldexp", "log1p",
    "nextafter", "tan",
)  # fmt: skip
_LEVEL = 99  # Above the level of TVM's own rules


def register() -> None:
    """Have TVM lower these functions to calls by OpenCL's names, and round vectors whole.

    Otherwise TVM splits vectors before it rounds them, with all later operators: kernels that quantise have
    two to four times as much source, which PoCL takes more than five times as long to build.
    """
    for name in NAMES:
        tirx.register_intrin_lowering(f"tirx.{name}", target="opencl", f=_by_name, level=_LEVEL)
    ir.register_op_attr("tirx.nearbyint", "TVectorizable", True)


def is_dot(expr: ir.Expr) -> bool:
    """Return whether an expression is a call of DOT."""
    name = str(getattr(getattr(expr, "op", None), "name", ""))
    return name.endswith("call_pure_extern") and str(expr.args[0].value) == DOT


def _by_name(call: tirx.PrimExpr) -> tirx.PrimExpr:
    name = str(call.op.name).removeprefix("tirx.")
    return tirx.call_pure_extern(call.ty, name, *call.args)
