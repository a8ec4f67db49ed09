"""Kernels in the manner of clpeak: nothing but multiply-adds of one width, nothing but loads of one width."""

from __future__ import annotations

from honed.runtime.compiled.model import KernelArg
from honed.tuner.lower.program import KernelLaunch

_GROUPS, _ITEMS = 2048, 256
_TURNS, _MADS = 64, 32  # Iterations of the loop, and multiply-adds in one
_LOADS = 16  # Loads of a work-item


def arithmetic(dtype: str, width: int) -> tuple[str, KernelLaunch]:
    """Return a kernel that multiplies and adds two values of `width` elements ("float" or "half")."""
    vector = f"{dtype}{width if width > 1 else ''}"
    pair = ["    x = mad(y, x, y);", "    y = mad(x, y, x);"]
    lines = [
        *(["#pragma OPENCL EXTENSION cl_khr_fp16 : enable"] if dtype == "half" else []),
        f"__kernel __attribute__((reqd_work_group_size({_ITEMS}, 1, 1)))",
        f"void peak(__global const {dtype}* restrict given, __global {vector}* restrict out) {{",
        f"  {vector} x = ({vector})(given[0]), y = ({vector})(({dtype})get_local_id(0));",
        f"  for (int n = 0; n < {_TURNS}; ++n) {{",
        *pair * (_MADS // 2),
        "  }",
        "  out[get_global_id(0)] = y;",
        "}",
    ]
    size = {"float": 4, "half": 2}[dtype] * width * _GROUPS * _ITEMS
    flops = 2 * width * _TURNS * _MADS * _GROUPS * _ITEMS
    return "\n".join(lines) + "\n", _launch({"float": "float32", "half": "float16"}[dtype], 4, size, flops)


def loads(width: int) -> tuple[str, KernelLaunch]:
    """Return a kernel that sums vectors of `width` floats; neighbours in a group load adjacent ones."""
    vector = f"float{width}"
    lines = [
        f"__kernel __attribute__((reqd_work_group_size({_ITEMS}, 1, 1)))",
        f"void peak(__global const {vector}* restrict given, __global float* restrict out) {{",
        f"  uint at = get_group_id(0) * {_LOADS * _ITEMS}u + get_local_id(0);",
        f"  {vector} sum = ({vector})(0);",
        *(f"  sum += given[at + {n * _ITEMS}u];" for n in range(_LOADS)),
        f"  out[get_global_id(0)] = {' + '.join(f'sum.s{n:x}' for n in range(width))};",
        "}",
    ]
    size = 4 * width * _LOADS * _GROUPS * _ITEMS
    return "\n".join(lines) + "\n", _launch("float32", size, 4 * _GROUPS * _ITEMS, 0)


def _launch(dtype: str, given: int, written: int, flops: int) -> KernelLaunch:
    return KernelLaunch(
        entry="peak",
        args=(0, 1),
        arg_types=(
            KernelArg(dtype=dtype, nbytes=given, access="read"),
            KernelArg(dtype=dtype, nbytes=written, access="write"),
        ),
        grid=(_GROUPS, 1, 1),
        block=(_ITEMS, 1, 1),
        flops=flops,
        bytes=given + written,
    )
