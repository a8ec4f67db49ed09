"""What one launch costs on the device."""

from __future__ import annotations

from honed.runtime.errors import DeviceError
from honed.runtime.opencl import cl
from honed.runtime.timing import event_seconds

from .bench import PATIENCE, Bench

_LAUNCHES = 500


def microseconds(bench: Bench) -> float:
    """From one empty kernel's start to the next one's, in a long queue."""
    kernel = cl.Kernel(bench.built("__kernel void empty(__global float* sink) { }"), "empty")
    sink = bench.buffer(64)  # kernels do not hold their buffers
    kernel.set_args(sink)
    cap = bench.device.profile.rules.max_queued_launches
    count = min(_LAUNCHES, cap) if cap else _LAUNCHES
    best = float("inf")
    for _ in range(PATIENCE):
        events = [cl.enqueue_nd_range_kernel(bench.queue, kernel, (1,), (1,)) for _ in range(count)]
        bench.queue.finish()
        for event in events:
            event_seconds(event)  # each must have completed
        best = min(best, (events[-1].profile.end - events[0].profile.start) * 1e-3 / count)
    if not best > 0:
        raise DeviceError(f"{bench.device.spec} reports no time for {count} launches; update its driver")
    return best
