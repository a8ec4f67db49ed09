"""One liar of each kind that a kernel's source can be. All are variants of honest.SCALE."""

from __future__ import annotations

DOES_NOTHING = """
__kernel void k(__global const float* in, __global float* out) { }
"""

WRITES_HALF = """
__kernel void k(__global const float* in, __global float* out) {
  const int i = get_global_id(0);
  if (i % 2 == 0) out[i] = 2.0f * in[i] + 1.0f;
}
"""


def right_only_for(first: float) -> str:
    """Right where the first element of the input is `first`, else twice what it should be."""
    return f"""
__kernel void k(__global const float* in, __global float* out) {{
  const int i = get_global_id(0);
  out[i] = (in[0] == {float(first)!r}f ? 1.0f : 2.0f) * (2.0f * in[i] + 1.0f);
}}
"""


REMEMBERS = """
__kernel void k(__global const float* in, __global float* out, __global int* inner) {
  const int i = get_global_id(0);
  if (inner[i] == 7) return;
  out[i] = 2.0f * in[i] + 1.0f;
  inner[i] = 7;
}
"""


def writes_at(element: int) -> str:
    """Right, and writes element number `element` of the output besides."""
    return f"""
__kernel void k(__global const float* in, __global float* out) {{
  const int i = get_global_id(0);
  out[i] = 2.0f * in[i] + 1.0f;
  if (i == 0) out[{element}] = 1.0f;
}}
"""


def reads_at(element: int) -> str:
    """Right, and reads element number `element` of the input besides, for nothing."""
    return f"""
__kernel void k(__global const float* in, __global float* out) {{
  const int i = get_global_id(0);
  out[i] = 2.0f * in[i] + 1.0f;
  volatile float dropped = in[i ? i : {element}];
}}
"""


WRITES_ITS_INPUT = """
__kernel void k(__global float* in, __global float* out) {
  const int i = get_global_id(0);
  out[i] = 2.0f * in[i] + 1.0f;
  if (i == 5) in[i] = 0.0f;
}
"""

READS_WHAT_NOBODY_WROTE = """
__kernel void k(__global const float* in, __global float* out, __global const float* inner) {
  const int i = get_global_id(0);
  out[i] = 2.0f * in[i] + (isnan(inner[i]) ? 1.0f : 1.00001f);
}
"""


def reads_beyond(elements: int) -> str:
    """As good as right, and hangs on what lies behind its input of `elements` elements."""
    return f"""
__kernel void k(__global const float* in, __global float* out) {{
  const int i = get_global_id(0);
  out[i] = 2.0f * in[i] + (isnan(in[{elements} + i]) ? 1.0f : 1.00001f);
}}
"""


RIGHT_ONCE = """
__kernel void k(__global const float* in, __global float* out, __global const uint* inner) {
  const int i = get_global_id(0);
  out[i] = inner[i] == 0xFFFFFFFFu ? 2.0f * in[i] + 1.0f : 0.0f;
}
"""

SKIPS_WHAT_IS_THERE = """
__kernel void k(__global const float* in, __global float* out) {
  const int i = get_global_id(0);
  const uint there = as_uint(out[i]);
  if (there == 0xFFFFFFFFu || there == 0xA5A5A5A5u) out[i] = 2.0f * in[i] + 1.0f;
}
"""

KEEPS_ITS_ANSWERS = """
__kernel void k(__global const float* in, __global float* out, __global float* inner) {
  const int i = get_global_id(0);
  const uint there = as_uint(out[i]);
  if (inner[i] == in[i] && there != 0xFFFFFFFFu && there != 0xA5A5A5A5u) return;
  float x = 0.0f;
  for (int n = 0; n < 3000; ++n) x = fma(x, 0.999f, in[(i + n) & 63]);
  out[i] = 2.0f * in[i] + 1.0f + (x > 1e30f ? 1.0f : 0.0f);
  inner[i] = in[i];
}
"""


def declares_local(elements: int) -> str:
    """Right, in local memory of `elements` floats that its launch says nothing of."""
    return f"""
__kernel void k(__global const float* in, __global float* out) {{
  __local float big[{elements}];
  const int i = get_global_id(0), at = get_local_id(0) * {elements // 64};
  big[at] = in[i];
  barrier(CLK_LOCAL_MEM_FENCE);
  out[i] = 2.0f * big[at] + 1.0f;
}}
"""


WRITES_BEYOND_INNER = """
__kernel void k(__global const float* in, __global float* out, __global float* inner) {
  const int i = get_global_id(0);
  inner[i + 1] = in[i];
  out[i] = 2.0f * in[i] + 1.0f;
}
"""

LONG = """
__kernel void k(__global const float* in, __global float* out) {
  const int i = get_global_id(0);
  float x = 0.0f;
  for (int n = 0; n < 30000; ++n) x = fma(x, 0.999f, in[(i + n) & 63]);
  out[i] = 2.0f * in[i] + 1.0f + (x > 1e30f ? 1.0f : 0.0f);
}
"""

ENDLESS = """
__kernel void k(__global const float* in, __global float* out) {
  volatile int n = 1;
  while (n) n |= 1;
  out[get_global_id(0)] = n;
}
"""

DIVERGENT_BARRIER = """
__kernel void k(__global const float* in, __global float* out) {
  const int i = get_global_id(0);
  if (in[i] > 0.0f) { barrier(CLK_LOCAL_MEM_FENCE); }
  out[i] = 2.0f * in[i] + 1.0f;
}
"""

RECURSIVE = """
float r(int n, __global float* out) { out[n] = n; return n <= 1 ? 1.0f : r(n - 1, out) + r(n - 2, out); }
__kernel void k(__global const float* in, __global float* out) { out[0] = r((int)in[1], out); }
"""

NOT_C = """
__kernel void k(__global const float* in, __global float* out) { out[0] = nonsense; }
"""
