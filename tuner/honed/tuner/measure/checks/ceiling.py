"""How fast a device can be at most with a workload: as far as was measured, and beyond all belief."""

from __future__ import annotations

from dataclasses import dataclass

from honed.machine import bounds
from honed.machine.mali import Model
from honed.machine.profile import DevicePeaks
from honed.tuner.measure.candidate import Workload

# No evidence makes a time believable that needs more than this often what microbenchmarks reach: honest
# kernels were seen at 1.3 of them, and at 2.2 of those of a busy machine; liars begin at 10.
BELIEVABLE = 3.0
# Four 8-bit multiply-adds fit one lane of 32 bits (dot-product instructions).
INTEGER_GAIN = 4.0


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the device can do at most with a workload's amount of work; rates per second."""

    operations: float
    bytes: float


def ceiling(workload: Workload, peaks: DevicePeaks) -> Ceiling:
    """What the device does at most with a workload."""
    gflops = bounds.gflops(peaks, half=False)
    if workload.half:
        gflops = max(gflops, bounds.gflops(peaks, half=True))
    if workload.integer:
        gflops *= INTEGER_GAIN
    return Ceiling(operations=gflops * 1e9, bytes=bounds.gbs(peaks, workload.bytes) * 1e9)


def physical(workload: Workload, measured: Ceiling, model: Model | None, cores: int) -> Ceiling:
    """What no evidence makes believable any more: far above what microbenchmarks measured.

    Where the GPU's model is known, its multiply-adds at a clock that no such chip has bound it more tightly.
    """
    operations = BELIEVABLE * measured.operations
    if model is not None and not workload.integer:
        chip = model.most_gflops(cores, half=workload.half) * 1e9
        operations = max(measured.operations, min(operations, chip))
    return Ceiling(operations=operations, bytes=BELIEVABLE * measured.bytes)


def beyond(workload: Workload, most: Ceiling, seconds: float) -> str:
    """Why a time is shorter than `most` allows, for a sentence; empty where it is not."""
    rate, moved = workload.flops / seconds, workload.bytes / seconds
    if rate > most.operations:
        return (
            f"{seconds * 1e6:.4g} us would be {rate * 1e-9:.4g} GFLOP/s and the device's measured peak "
            f"allows {most.operations * 1e-9:.4g}"
        )
    if moved > most.bytes:
        return (
            f"{seconds * 1e6:.4g} us would move {moved * 1e-9:.4g} GB/s and what was measured at this size "
            f"allows {most.bytes * 1e-9:.4g} GB/s"
        )
    return ""
