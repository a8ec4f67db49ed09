"""A model whose time is chosen: one work-group's loop, so that versions differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from honed.runtime.compiled.model import Probe, Proof
from tests.runtime.builder import Builder

SIZE = 64
X = np.arange(SIZE, dtype=np.float32) / SIZE
# y = x + 1, or what `extra` (C, of x) says.
_SOURCE = """__kernel void spin(__global const float* x, __global float* y) {{
  int i = get_global_id(0);
  volatile float wait = 0.0f;
  for (int n = 0; n < {turns}; ++n) wait += 1.0f;
  y[i] = x[i] + 1.0f;
  {extra}
}}"""


def write(
    path: Path,
    turns: int,
    extra: str = "",
    sha256: str = "0" * 64,
    also: Callable[[Builder], None] = lambda _: None,
) -> Path:
    """A compiled model with a probe, made from a source with this hash; `also` adds to it.

    60,000 turns of the loop take about 10 ms on a processor.
    """
    builder = Builder(sha256=sha256)
    x, y = builder.input("x", "float32", (SIZE,)), builder.output("y", "float32", (SIZE,))
    source = _SOURCE.format(turns=turns, extra=extra)
    builder.launch(builder.kernel(source, "spin", "rw", 4 * SIZE, groups=1, block=SIZE), x, y)
    given, wanted = builder.constant(X), builder.constant(X + 1)
    probe = Probe(inputs=(given,), outputs=(wanted,), tolerance=(1e-5,))
    builder.proof = Proof(reference="by hand", probes=(probe,), device=None, error=())
    also(builder)
    return builder.write(path)
