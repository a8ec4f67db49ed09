"""Computes what a device's peaks allow, and how they rise: arithmetic on `DevicePeaks`, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .profile import DevicePeaks, Figure

# Bytes of a working set that no cache of the devices at hand holds: `bandwidth_gbs` applies from here on.
BEYOND_CACHES = 64 << 20
# Share of CPU time that other programs may use while peaks are measured, before the peaks are doubted.
BUSY = 0.1


def busy(peaks: DevicePeaks) -> bool:
    """Return whether other programs were busy while the peaks were measured, so that they may be too low."""
    return peaks.busy is not None and peaks.busy > BUSY


def is_lower_bound(peaks: DevicePeaks, figure: Figure) -> bool:
    """Return whether a figure may be too low: a kernel has exceeded it, or the machine was busy."""
    return figure in peaks.raised or busy(peaks)


def gflops(peaks: DevicePeaks, *, half: bool) -> float:
    """Return the peak of arithmetic in GFLOP/s at half or single precision.

    If a device has no peak for half precision, returns that of single precision.
    """
    return (peaks.fp16_gflops if half else None) or peaks.fp32_gflops


def gbs(peaks: DevicePeaks, nbytes: int) -> float:
    """Return the highest rate in GB/s at which a working set of `nbytes` moves.

    It is the best rate of all measured sizes from the nearest smaller one on: a smaller working set may be
    faster because of a cache too small for this one.
    """
    sizes = [size for size, _ in peaks.caches_gbs]
    least = max((size for size in sizes if size <= nbytes), default=0)
    cached = [] if nbytes >= BEYOND_CACHES else [rate for size, rate in peaks.caches_gbs if size >= least]
    return max([peaks.bandwidth_gbs, *cached])


def least_seconds(peaks: DevicePeaks, flops: float, nbytes: int, *, half: bool) -> float:
    """Return the least seconds for `flops` operations and `nbytes` bytes by Williams' roofline.

    The launch is not included.
    """
    return max(flops / (gflops(peaks, half=half) * 1e9), nbytes / (gbs(peaks, nbytes) * 1e9))


def launch_seconds(peaks: DevicePeaks) -> float:
    """Return the least seconds of any kernel by the device's clock, whatever it does."""
    return 1e-6 * (peaks.launch_us if peaks.empty_us is None else peaks.empty_us)


def higher(one: DevicePeaks, other: DevicePeaks) -> DevicePeaks:
    """Return the best of two measurements, figure by figure.

    A figure that a kernel raised stays marked as raised if no benchmark reached it.
    """
    half = [rate for rate in (one.fp16_gflops, other.fp16_gflops) if rate is not None]
    load = [share for share in (one.busy, other.busy) if share is not None]
    empty = [us for us in (one.empty_us, other.empty_us) if us is not None]
    caches = {size: rate for peaks in (one, other) for size, rate in peaks.caches_gbs}
    for size, rate in (*one.caches_gbs, *other.caches_gbs):
        caches[size] = max(caches[size], rate)
    raised = {*_figures_unreached(one, other), *_figures_unreached(other, one)}
    return DevicePeaks(
        fp32_gflops=max(one.fp32_gflops, other.fp32_gflops),
        fp16_gflops=max(half, default=None),
        bandwidth_gbs=max(one.bandwidth_gbs, other.bandwidth_gbs),
        launch_us=min(one.launch_us, other.launch_us),
        caches_gbs=tuple(sorted(caches.items())),
        raised=tuple(sorted(raised)),
        empty_us=min(empty, default=None),
        busy=min(load, default=None),
    )


def with_traffic(peaks: DevicePeaks, nbytes: int, rate: float) -> DevicePeaks:
    """Return the peaks after a working set of `nbytes` moved at a measured `rate` in GB/s."""
    if rate <= gbs(peaks, nbytes):
        return peaks
    if nbytes >= BEYOND_CACHES:
        return replace(peaks, bandwidth_gbs=rate)
    sizes = [size for size, _ in peaks.caches_gbs]
    size = max((size for size in sizes if size <= nbytes), default=min(sizes, default=nbytes))
    return replace(peaks, caches_gbs=tuple(sorted({**dict(peaks.caches_gbs), size: rate}.items())))


def raise_peaks(peaks: DevicePeaks, flops: float, nbytes: int, seconds: float, *, half: bool) -> DevicePeaks:
    """Return the peaks after a verified kernel did `flops` operations and moved `nbytes` in `seconds`."""
    raised, rate, moved = set(peaks.raised), flops / seconds * 1e-9, nbytes / seconds * 1e-9
    if moved > gbs(peaks, nbytes):
        raised.add("bandwidth_gbs")
        peaks = with_traffic(peaks, nbytes, moved)
    if rate > gflops(peaks, half=half):
        figure: Figure = "fp16_gflops" if half and peaks.fp16_gflops else "fp32_gflops"
        raised.add(figure)
        if figure == "fp16_gflops":
            peaks = replace(peaks, fp16_gflops=rate)
        else:
            peaks = replace(peaks, fp32_gflops=rate)
    return replace(peaks, raised=tuple(sorted(raised)))


def _figures_unreached(one: DevicePeaks, other: DevicePeaks) -> list[Figure]:
    """Return the figures of `one` that kernels raised and no benchmark of `other` has reached."""
    ours, theirs = _rates(one), _rates(other)
    return [
        figure
        for figure in one.raised
        if figure in other.raised
        or any(rate > theirs[figure].get(size, 0.0) for size, rate in ours[figure].items())
    ]


def _rates(peaks: DevicePeaks) -> Mapping[Figure, dict[int, float]]:
    """Return the measured rates of each figure, by working set in bytes (0 for arithmetic)."""
    return {
        "fp32_gflops": {0: peaks.fp32_gflops},
        "fp16_gflops": {0: peaks.fp16_gflops or 0.0},
        "bandwidth_gbs": {**dict(peaks.caches_gbs), BEYOND_CACHES: peaks.bandwidth_gbs},
    }
