"""Small models whose right answers are known bit by bit, made without a compiler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.runtime.compiled.model import Copy, Probe, Proof
from tests.runtime.builder import Builder

Array = NDArray[np.float32]
# The guards keep altered grids inside the buffers: what a kernel may do is not what is attacked here.
_SOURCE = """__kernel void shift(__global const float* a, __global const float* b, __global float* out) {{
  int i = get_global_id(0); if (i < {n}) out[i] = a[i] + b[i]; }}
__kernel void increment(__global const float* a, __global float* out) {{
  int i = get_global_id(0); if (i < {n}) out[i] = a[i] + 1.0f; }}
"""
_SPREAD = "__kernel void spread(__global const float* a, __global float* b) { b[get_global_id(0)] = a[0]; }"


@dataclass(frozen=True)
class Victim:
    """y = (x + c) + 1 with c = k, k + 1, ..., prepared as a copy: `n` elements in and out."""

    n: int
    k: int

    @cached_property
    def _c(self) -> Array:
        return np.arange(self.k, self.k + self.n, dtype=np.float32)

    def answer(self, x: Array) -> Array:
        """What the model must give for `x`, to the last bit."""
        return ((x + self._c) + np.float32(1)).astype(np.float32)

    def builder(self) -> Builder:
        """The model, with one probe."""
        b, n = Builder(), self.n
        source = _SOURCE.format(n=n)
        x, c = b.input("x", "float32", (n,)), b.constant(self._c)
        s, y = b.scratch("float32", (n,)), b.output("y", "float32", (n,))
        p = b.prepared("float32", (n,))
        b.prepare.append(Copy(source=c, target=p))
        b.launch(b.kernel(source, "shift", "rrw", 4 * n, groups=n, block=1), x, p, s)
        b.launch(b.kernel(source, "increment", "rw", 4 * n, groups=n, block=1), s, y)
        given = np.linspace(-3, 3, n, dtype=np.float32)
        probe = Probe(
            inputs=(b.constant(given),), outputs=(b.constant(self.answer(given)),), tolerance=(0.0,)
        )
        b.proof = Proof(reference="by hand", probes=(probe,), device=None, error=())
        return b

    def write(self, path: Path) -> Path:
        """As a .honed file."""
        return self.builder().write(path)

    def request(self, name: str, x: Array, **more: Any) -> dict[str, Any]:
        """Parameters of ModelInfer."""
        return {
            "model_name": name,
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [self.n]}],
            "raw_input_contents": [x.tobytes()],
            **more,
        }


def wide(path: Path, n: int = 100_000) -> Path:
    """One number in, `n` equal ones out: small requests with large answers."""
    b = Builder()
    x, y = b.input("x", "float32", (1,)), b.output("y", "float32", (n,))
    b.launch(b.kernel(_SPREAD, "spread", "rw", 4, groups=n, block=1), x, y)
    return b.write(path)
