"""Microbenchmarks: what a device can do at most, by its own clock.

Devices differ in what they like, so several forms of each kernel are tried and the best counts.
"""

from __future__ import annotations

from honed.machine import cpuload
from honed.machine.devices import Device
from honed.machine.opencl import driver_call
from honed.machine.profile import DevicePeaks

from . import arithmetic, launches, memory
from .bench import Bench

__all__ = ["measure"]


def measure(device: Device) -> DevicePeaks:
    """The peaks of `device`, measured now; raises DeviceError where a kernel or the clock fails."""
    before = cpuload.read()
    with driver_call("measure the device's peaks"):
        bench = Bench(device)
        half = arithmetic.gflops(bench, "half") if device.profile.limits.fp16 else None
        single = arithmetic.gflops(bench, "float")
        caches, main = memory.gbs(bench)
        empty = launches.empty_kernels(bench)
    return DevicePeaks(
        fp32_gflops=single,
        fp16_gflops=half,
        bandwidth_gbs=main,
        launch_us=empty.apart,
        empty_us=empty.alone,
        caches_gbs=caches,
        busy=cpuload.others(before, cpuload.read()),
    )
