"""The hand-written matrix product that facts/valhall.md measures by: what a generated kernel should reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

from honed.runtime.compiled.model import KernelArg
from honed.tuner.lower.program import KernelLaunch

ROWS, COLUMNS, STEPS = 4, 8, 4  # Size of a work-item's tile, and steps of the reduction at once
_ALONG, _GROUP = 16, 64  # Work-items of a group along the columns at most, and in all


@dataclass(frozen=True, slots=True)
class Product:
    """C[batch,m,n] = A[batch,m,k] B[k,n] in halves, or B[batch,k,n] where each of the batch has its own."""

    batch: int
    m: int
    n: int
    k: int
    shared: bool

    def __str__(self) -> str:
        return f"{self.batch}x{self.m}x{self.k}x{self.n}"


def product(what: Product) -> tuple[str, KernelLaunch]:
    """Return a product alone, accumulating halves in halves, as OpenCL C, and its launch.

    The batch is the launch's third dimension. Rows and columns must be multiples of a group's, and the
    reduction of `STEPS`.
    """
    m, n, k = what.m, what.n, what.k
    along = math.gcd(n // COLUMNS, _ALONG)
    down = _GROUP // along
    batched = "" if what.shared else f" + z * {k * n}u"
    rows = range(ROWS)
    lines = [
        "#pragma OPENCL EXTENSION cl_khr_fp16 : enable",
        f"__kernel __attribute__((reqd_work_group_size({along}, {down}, 1)))",
        "void hand(__global const half* restrict A, __global const half* restrict B,",
        "          __global half* restrict C) {",
        "  const uint x = get_global_id(0), y = get_global_id(1), z = get_global_id(2);",
        f"  __global const half* a = A + z * {m * k}u + y * {ROWS * k}u;",
        f"  __global const half* b = B{batched} + x * {COLUMNS}u;",
        *(f"  half8 c{i} = (half8)(0);" for i in rows),
        f"  for (int i = 0; i < {k}; i += {STEPS}) {{",
        *(f"    const half{STEPS} a{i} = *(__global const half{STEPS}*)(a + {i * k});" for i in rows),
    ]
    for step in range(STEPS):
        lines.append(f"    const half8 b{step} = *(__global const half8*)(b + {step * n});")
        lines += [f"    c{i} = mad((half8)(a{i}.s{step:x}), b{step}, c{i});" for i in rows]
    lines += [f"    a += {STEPS}; b += {STEPS * n};", "  }"]
    lines.append(f"  __global half* c = C + z * {m * n}u + y * {ROWS * n}u + x * {COLUMNS}u;")
    lines += [f"  *(__global half8*)(c + {i * n}) = c{i};" for i in rows]
    lines.append("}")
    sizes = (2 * what.batch * m * k, 2 * (1 if what.shared else what.batch) * k * n, 2 * what.batch * m * n)
    launch = KernelLaunch(
        entry="hand",
        args=(0, 1, 2),
        arg_types=tuple(
            KernelArg(dtype="float16", nbytes=size, access="read" if i < 2 else "write")
            for i, size in enumerate(sizes)
        ),
        grid=(n // COLUMNS // along, m // ROWS // down, what.batch),
        block=(along, down, 1),
        flops=2 * what.batch * m * n * k,
        bytes=sum(sizes),
    )
    return "\n".join(lines) + "\n", launch
