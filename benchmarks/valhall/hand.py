"""The hand-written matrix product that facts/valhall.md measures by: what a generated kernel should reach."""

from __future__ import annotations

from honed.runtime.model import KernelArg
from honed.tuner.lower.program import KernelLaunch

ROWS, COLUMNS, STEPS = 4, 8, 4  # of a work-item's tile, and of the reduction at once
_ALONG, _DOWN = 16, 4  # work-items of a group


def product(m: int, n: int, k: int, accumulator: str = "half") -> tuple[str, KernelLaunch]:
    """C[m,n] = A[m,k] B[k,n] + bias in halves, in OpenCL C, and how it is launched."""
    vector = f"{accumulator}{COLUMNS}"
    whole = f"convert_{vector}" if accumulator != "half" else ""
    rows = range(ROWS)
    lines = [
        "#pragma OPENCL EXTENSION cl_khr_fp16 : enable",
        f"__kernel __attribute__((reqd_work_group_size({_ALONG}, {_DOWN}, 1)))",
        "void hand(__global const half* restrict A, __global const half* restrict B,",
        "          __global const half* restrict bias, __global half* restrict C) {",
        "  const uint n = get_global_id(0), m = get_global_id(1);",
        f"  __global const half* a = A + m * {ROWS * k}u;",
        f"  __global const half* b = B + n * {COLUMNS}u;",
        *(f"  {vector} c{i} = ({vector})(0);" for i in rows),
        f"  for (int k = 0; k < {k}; k += {STEPS}) {{",
        *(f"    const half{STEPS} a{i} = *(__global const half{STEPS}*)(a + {i * k});" for i in rows),
    ]
    for step in range(STEPS):
        lines.append(f"    const half8 b{step} = *(__global const half8*)(b + {step * n});")
        lines += [
            f"    c{i} = mad(({vector})(a{i}.s{step:x}), {whole}(b{step}), c{i});"
            if whole
            else f"    c{i} = mad((half8)(a{i}.s{step:x}), b{step}, c{i});"
            for i in rows
        ]
    lines += [f"    a += {STEPS}; b += {STEPS * n};", "  }"]
    lines.append(f"  const half8 add = *(__global const half8*)(bias + n * {COLUMNS}u);")
    lines.append(f"  __global half* c = C + m * {ROWS * n}u + n * {COLUMNS}u;")
    back = "convert_half8" if whole else ""
    lines += [f"  *(__global half8*)(c + {i * n}) = {back}(c{i}) + add;" for i in rows]
    lines.append("}")
    sizes = (2 * m * k, 2 * k * n, 2 * n, 2 * m * n)
    launch = KernelLaunch(
        entry="hand",
        args=(0, 1, 2, 3),
        arg_types=tuple(
            KernelArg(dtype="float16", nbytes=size, access="read" if i < 3 else "write")
            for i, size in enumerate(sizes)
        ),
        grid=(n // COLUMNS // _ALONG, -(-m // ROWS // _DOWN), 1),
        block=(_ALONG, _DOWN, 1),
        flops=2 * m * n * k,
        bytes=sum(sizes),
    )
    return "\n".join(lines) + "\n", launch
