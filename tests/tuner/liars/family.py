"""Right kernels of many kinds, dtypes and shapes: none may ever be refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from honed.runtime import dtypes
from honed.tuner.lower.program import MemoryValue
from honed.tuner.measure.candidate import Candidate, Workload

from . import honest

_SIZES = (1, 3, 64, 1000, 4096, 65_536, 300_000, 1_000_000)
_TYPES = ("float32", "float64", "int8", "uint8", "int32", "int64", "bool")
_DENSE = ((8, 8, 8), (96, 128, 64), (192, 512, 256), (1, 1000, 1024), (256, 256, 256), (33, 65, 17))
_ROWS = ((4, 16), (64, 1000), (192, 512), (768, 192), (1, 100_000))


@dataclass(frozen=True, slots=True)
class Honest:
    """A workload and its right kernels."""

    name: str
    workload: Workload
    candidates: tuple[Candidate, ...]


def all_of(folder: Path, rounds: int, fp64: bool) -> Iterator[Honest]:
    """About 100 candidates a round, with other inputs in each."""
    for seed in range(rounds):
        place = folder / str(seed)
        for dtype in _TYPES:
            if fp64 or dtype != "float64":
                for n in _SIZES:
                    yield _copy(place / f"copy-{dtype}-{n}", dtype, n, seed)
        for m, n, k in _DENSE:
            yield _dense(place / f"dense-{m}x{n}x{k}", m, n, k, seed)
        for rows, columns in _ROWS:
            yield _row_sums(place / f"rows-{rows}x{columns}", rows, columns, seed)


def _copy(folder: Path, dtype: str, n: int, seed: int) -> Honest:
    """out = in, also of values that look like poison: all bits set, NaN, and 0xA5."""
    rng = np.random.default_rng(seed)
    itemsize = np.dtype(dtype).itemsize

    def one() -> np.ndarray:
        if dtype == "bool":
            return rng.integers(0, 2, n).astype(bool)
        raw = rng.integers(0, 256, (n, itemsize), dtype=np.uint8)
        raw[rng.random(n) < 0.1] = 0xFF
        raw[rng.random(n) < 0.1] = 0xA5
        return raw.reshape(-1).view(dtype)

    drawn = [one() for _ in range(3)]
    workload = honest.kept(folder, [((x,), (x,)) for x in drawn], flops=0)
    kind = dtypes.dtype(dtype).opencl
    made = []
    for group in (1, 64):
        groups = -(-n // group)
        source = (
            f"__kernel void k(__global const {kind}* in, __global {kind}* out) {{\n"
            f"  const int i = get_group_id(0) * {group} + get_local_id(0);\n"
            f"  if (i < {n}) out[i] = in[i];\n}}\n"
        )
        if groups <= 65_536:
            made.append(honest.candidate(workload, source, groups=groups, group=group))
    return Honest(folder.name, workload, tuple(made))


def _dense(folder: Path, m: int, n: int, k: int, seed: int) -> Honest:
    workload = honest.dense(folder, m, n, k, seed=seed)
    made = [
        honest.candidate(workload, honest.dense_source(n, k), groups=m * n // group, group=group)
        for group in (1, 16, 64)
        if m * n % group == 0
    ]
    made.append(honest.candidate(workload, _rows_source(m, n, k), groups=m, group=1))
    return Honest(folder.name, workload, tuple(made))


def _rows_source(m: int, n: int, k: int) -> str:
    """A work-item a row, summing over k outermost: another order of additions."""
    return f"""
__kernel void k(__global const float* a, __global const float* b, __global float* out) {{
  const int row = get_global_id(0);
  for (int j = 0; j < {n}; ++j) out[row * {n} + j] = 0.0f;
  for (int i = {k} - 1; i >= 0; --i)
    for (int j = 0; j < {n}; ++j) out[row * {n} + j] += a[row * {k} + i] * b[i * {n} + j];
}}
"""


def _row_sums(folder: Path, rows: int, columns: int, seed: int) -> Honest:
    """Sums of rows with local memory and a barrier, and by way of an inner buffer."""
    rng = np.random.default_rng(seed)
    drawn = [rng.random((rows, columns)).astype(np.float32) for _ in range(3)]
    sets = [((x,), (x.sum(1, dtype=np.float64).astype(np.float32),)) for x in drawn]
    workload = honest.kept(folder, sets, flops=rows * columns)
    local = f"""
__kernel void k(__global const float* in, __global float* out) {{
  __local float part[64];
  const int row = get_group_id(0), me = get_local_id(0);
  float sum = 0.0f;
  for (int i = me; i < {columns}; i += 64) sum += in[row * {columns} + i];
  part[me] = sum;
  for (int step = 32; step > 0; step = step / 2) {{
    barrier(CLK_LOCAL_MEM_FENCE);
    if (me < step) part[me] += part[me + step];
  }}
  if (me == 0) out[row] = part[0];
}}
"""
    split = f"""
__kernel void k(__global const float* in, __global float* out, __global float* inner) {{
  const int row = get_group_id(0);
  for (int p = 0; p < 8; ++p) {{
    inner[row * 8 + p] = 0.0f;
    for (int i = p; i < {columns}; i += 8) inner[row * 8 + p] += in[row * {columns} + i];
  }}
  float sum = 0.0f;
  for (int p = 0; p < 8; ++p) sum += inner[row * 8 + p];
  out[row] = sum;
}}
"""
    inner = (MemoryValue(dtype="float32", shape=(rows, 8)),)
    made = (
        honest.candidate(workload, local, groups=rows, group=64),
        honest.candidate(workload, split, groups=rows, group=1, inner=inner),
    )
    return Honest(folder.name, workload, made)
