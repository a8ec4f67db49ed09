"""What one launch costs, however little its kernel does."""

from __future__ import annotations

from dataclasses import dataclass

from honed.machine.opencl import cl, event_seconds
from honed.protocol.errors import DeviceError

from .bench import PATIENCE, Bench

_LAUNCHES = 500


@dataclass(frozen=True, slots=True)
class EmptyKernels:
    """Empty kernels in a long queue, microseconds at the least."""

    apart: float  # from one's start to the next one's: where the device is fast, the host is what limits
    alone: float  # from START to END of one


def empty_kernels(bench: Bench) -> EmptyKernels:
    """Time empty kernels; raises DeviceError where the device reports no time for all of them."""
    kernel = cl.Kernel(bench.built("__kernel void empty(__global float* sink) { }"), "empty")
    sink = bench.buffer(64)  # kernels do not hold their buffers
    kernel.set_args(sink)
    cap = bench.device.profile.rules.max_queued_launches
    count = min(_LAUNCHES, cap) if cap else _LAUNCHES
    apart = alone = float("inf")
    for _ in range(PATIENCE):
        events = [cl.enqueue_nd_range_kernel(bench.queue, kernel, (1,), (1,)) for _ in range(count)]
        bench.queue.finish()
        alone = min(alone, *(event_seconds(event) for event in events))  # each must have completed
        apart = min(apart, (events[-1].profile.end - events[0].profile.start) * 1e-3 / count)
    if not apart > 0:
        raise DeviceError(f"{bench.device.spec} reports no time for {count} launches; update its driver")
    return EmptyKernels(apart, alone * 1e6)
