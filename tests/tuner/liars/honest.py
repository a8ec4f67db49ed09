"""Workloads with right kernels written by hand: what liars are made from, and what must never be refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from honed.runtime.compiled.model import KernelArg
from honed.tuner.lower.program import KernelLaunch, MemoryValue
from honed.tuner.measure.candidate import Candidate, Workload

Array = NDArray[np.generic]
GROUP = 64
N = 4096  # Elements of the workload `scale`


def kept(
    folder: Path,
    sets: Sequence[tuple[Sequence[Array], Sequence[Array]]],
    *,
    flops: int,
    tolerance: float = 1e-3,
) -> Workload:
    """A workload whose sets of inputs and outputs are saved in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (inputs, outputs) in enumerate(sets):
        for parameter, array in enumerate((*inputs, *outputs)):
            np.save(folder / f"{number}.{parameter}.npy", array)
    inputs, outputs = sets[0]
    arrays = (*inputs, *outputs)
    return Workload(
        task=folder.name,
        parameters=tuple(MemoryValue(dtype=a.dtype.name, shape=a.shape) for a in arrays),
        outputs=tuple(range(len(inputs), len(arrays))),
        sets=len(sets),
        folder=folder,
        flops=flops,
        bytes=sum(a.nbytes for a in arrays),
        tolerance=tuple(tolerance if a.dtype.kind == "f" else 0.0 for a in outputs),
    )


def launch(
    values: Sequence[MemoryValue],
    outputs: Sequence[int],
    *,
    groups: int,
    group: int = GROUP,
    entry: str = "k",
    args: Sequence[int] | None = None,
) -> KernelLaunch:
    """One launch over `groups` work-groups whose arguments are all of `values`, in order."""
    args = tuple(range(len(values)) if args is None else args)
    return KernelLaunch(
        entry=entry,
        args=args,
        arg_types=tuple(
            KernelArg(
                dtype=values[i].dtype, nbytes=values[i].nbytes, access="readwrite" if i in outputs else "read"
            )
            for i in args
        ),
        grid=(groups, 1, 1),
        block=(group, 1, 1),
        flops=0,
        bytes=0,
    )


def candidate(
    workload: Workload, source: str, *, groups: int, group: int = GROUP, inner: Sequence[MemoryValue] = ()
) -> Candidate:
    """`source`, which has one kernel `k`, on all parameters and inner buffers of a workload."""
    values = (*workload.parameters, *inner)
    writable = [*workload.outputs, *range(len(workload.parameters), len(values))]
    return Candidate(
        id=hashlib.sha256(source.encode()).hexdigest(),
        source=source,
        inner=tuple(inner),
        launches=(launch(values, writable, groups=groups, group=group),),
    )


def scale(folder: Path, n: int = N, sets: int = 3, seed: int = 1) -> Workload:
    """out[i] = 2 in[i] + 1, float32."""
    rng = np.random.default_rng(seed)
    drawn = [rng.standard_normal(n).astype(np.float32) for _ in range(sets)]
    return kept(folder, [((x,), (2 * x + 1,)) for x in drawn], flops=2 * n)


SCALE = """
__kernel void k(__global const float* in, __global float* out) {
  const int i = get_global_id(0);
  out[i] = 2.0f * in[i] + 1.0f;
}
"""


def dense(folder: Path, m: int = 96, n: int = 128, k: int = 64, sets: int = 3, seed: int = 2) -> Workload:
    """out[m, n] = sum over k of a[m, k] b[k, n], float32."""
    rng = np.random.default_rng(seed)

    def one() -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        a = rng.standard_normal((m, k)).astype(np.float32)
        b = rng.standard_normal((k, n)).astype(np.float32)
        return (a, b), ((a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32),)

    return kept(folder, [one() for _ in range(sets)], flops=2 * m * n * k)


def dense_source(n: int, k: int) -> str:
    """One work-item an output."""
    return f"""
__kernel void k(__global const float* a, __global const float* b, __global float* out) {{
  const int row = get_global_id(0) / {n}, column = get_global_id(0) % {n};
  float sum = 0.0f;
  for (int i = 0; i < {k}; ++i) sum += a[row * {k} + i] * b[i * {n} + column];
  out[row * {n} + column] = sum;
}}
"""
