"""What every microbenchmark needs: a queue with profiling, programs, the shortest of many launches."""

from __future__ import annotations

from typing import Any

from honed.machine.devices import Device
from honed.machine.opencl import cl, context, event_seconds
from honed.machine.profile import DeviceLimits
from honed.protocol.errors import DeviceError

PATIENCE = 8  # launches


class Bench:
    """One device, opened for measuring.

    Its methods raise pyopencl's errors, and DeviceError where the device's clock is no good.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.limits: DeviceLimits = device.profile.limits
        self.context = context(device.cl)
        properties = cl.command_queue_properties.PROFILING_ENABLE
        self.queue = cl.CommandQueue(self.context, properties=properties)

    def built(self, source: str) -> Any:
        """The program."""
        header = "#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n" if "half" in source else ""
        return cl.Program(self.context, header + source).build(cache_dir=False)

    def buffer(self, nbytes: int) -> Any:
        """Memory that kernels may read and write."""
        return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, nbytes)

    def seconds(self, kernel: Any, items: int, group: int, *args: Any) -> float:
        """How long one launch ran by the device's clock."""
        kernel.set_args(*args)
        event = cl.enqueue_nd_range_kernel(self.queue, kernel, (items,), (group,))
        event.wait()
        seconds = event_seconds(event)
        if not seconds > 0:
            raise DeviceError("the device reports no time for a kernel that ran; update its driver")
        return seconds

    def shortest(self, kernel: Any, items: int, group: int, *args: Any) -> float:
        """Seconds of the fastest launch, tried until PATIENCE launches in a row were no faster.

        So a device that is clocking up, or busy with something else for a moment, still shows its peak.
        """
        best, stale = float("inf"), 0
        while stale < PATIENCE:
            seconds = self.seconds(kernel, items, group, *args)
            stale = 0 if seconds < 0.99 * best else stale + 1
            best = min(best, seconds)
        return best
