"""Kernels of our own that show what the device can do right now: a yardstick, and probes of its memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from honed.machine.opencl import cl

from .checks.clocks import Finished, Launched

GROUP = 64  # work-items
_GROUPS_PER_UNIT = 4
_STEPS = 512  # of the yardstick: about 25 us on an H100, 0.3 ms on two CPU cores
_TABLE = 1 << 14  # floats the yardstick loads from: 64 KiB, within every second-level cache

# The same work on the same device always, so that yardsticks of different days compare. Half its time goes
# into dependent multiply-adds, half into loads.
_YARDSTICK = f"""
__kernel void yardstick(__global const float* table, __global float* sink) {{
  const uint me = get_global_id(0);
  float a = (float)(me & 7u), b = 1.0f, c = 2.0f, d = 3.0f;
  for (uint i = 0; i < {_STEPS}u; ++i) {{
    const float x = table[(me + i * {GROUP}u) & {_TABLE - 1}u];
    a = fma(a, 0.5f, x); b = fma(b, 0.5f, x); c = fma(c, 0.5f, a); d = fma(d, 0.5f, b);
  }}
  sink[me] = a + b + c + d;
}}
"""

# Few long work-items suit a CPU, many short ones a GPU; reading alone is faster than copying in caches.
_TRAFFIC = """
__kernel void copy_long(__global const float4* in, __global float4* out, const uint n) {
  for (uint i = get_global_id(0); i < n; i += get_global_size(0)) out[i] = in[i];
}
__kernel void copy_short(__global const float4* in, __global float4* out, const uint n) {
  out[get_global_id(0)] = in[get_global_id(0)];
}
__kernel void read_long(__global const float4* in, __global float4* out, const uint n) {
  float4 s = 0.0f;
  for (uint i = get_global_id(0); i < n; i += get_global_size(0)) s += in[i];
  out[get_global_id(0)] = s;
}
"""
_MOST_BYTES = 64 << 20  # of one probe buffer; beyond it the measured bandwidth of the device holds
_REPEATS = 6


def reading(event: Any) -> Launched:
    """What the driver says of a finished launch: the one place that reads events."""
    profile = event.profile
    return Launched(event.command_execution_status, profile.start, profile.end)


class Yardstick:
    """The fixed kernel measured in turns with candidates."""

    def __init__(self, context: Any, queue: Any, compute_units: int) -> None:
        """Build it; raises pyopencl's errors."""
        items = compute_units * _GROUPS_PER_UNIT * GROUP
        flags = cl.mem_flags
        table = np.linspace(0.0, 1.0, _TABLE, dtype=np.float32)
        self._memory = (
            cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=table),
            cl.Buffer(context, flags.READ_WRITE, items * 4),
        )
        self._kernel = cl.Kernel(cl.Program(context, _YARDSTICK).build(cache_dir=False), "yardstick")
        self._kernel.set_args(*self._memory)
        self._items = items
        self._queue = queue

    def enqueue(self) -> Any:
        """Its event."""
        return cl.enqueue_nd_range_kernel(self._queue, self._kernel, (self._items,), (GROUP,))

    def seconds(self) -> float:
        """Run it once and wait."""
        event = self.enqueue()
        event.wait()
        return Finished((reading(event),), 0.0).seconds


def traffic(context: Any, queue: Any, compute_units: int, nbytes: int) -> float | None:
    """Bytes per second of the fastest way to move `nbytes`, half in and half out or all in.

    None where that is more than the caches of any device hold: its bandwidth is in the profile then.
    """
    if nbytes > 2 * _MOST_BYTES:
        return None
    program = cl.Program(context, _TRAFFIC).build(cache_dir=False)
    most = max(nbytes, 1 << 12)
    source, target = (cl.Buffer(context, cl.mem_flags.READ_WRITE, -(-most // 1024) * 1024) for _ in range(2))
    cl.enqueue_fill_buffer(queue, source, np.float32(1), 0, source.size)
    long_items = compute_units * _GROUPS_PER_UNIT * GROUP
    best = 0.0
    for name, moved in (("copy_long", most // 2), ("copy_short", most // 2), ("read_long", most)):
        groups = max(1, moved // 16 // GROUP)
        items = groups * GROUP if name == "copy_short" else min(groups * GROUP, long_items)
        counted = groups * GROUP
        kernel = cl.Kernel(program, name)
        kernel.set_args(source, target, np.uint32(counted))
        total = counted * 16 * (1 if name == "read_long" else 2)
        for _ in range(_REPEATS):
            event = cl.enqueue_nd_range_kernel(queue, kernel, (items,), (GROUP,))
            event.wait()
            seconds = Finished((reading(event),), 0.0).seconds
            if seconds > 0:
                best = max(best, total / seconds)
    return best or None
