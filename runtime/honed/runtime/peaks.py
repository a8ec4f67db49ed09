"""What a device can do at most, measured on it once and kept: arithmetic, bandwidth, cost of a launch.

Several variants of each kernel are tried and the best counts, as devices differ in the vector width they
like. Every figure comes from the device's own clock.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from . import profilefile
from .devices import Device
from .errors import DeviceError, HonedError, NotFound, ProfileError
from .files import replacing
from .opencl import cl, context, driver_call
from .profile import DevicePeaks, DeviceProfile
from .strict import to_plain
from .timing import event_seconds

ARITHMETIC_WIDTHS = (1, 2, 4, 16)
BANDWIDTH_WIDTHS = (1, 4, 16)
CHAINS = 10  # independent accumulators a work-item keeps busy
GROUP = 64  # work-items
GROUPS_PER_UNIT = 32
TARGET_SECONDS = 0.02  # of one timed launch; long enough for a clock to rise, short enough for every watchdog
SHORTER = 16  # a launch as much shorter fits between the interruptions of a busy CPU
MAX_ITERATIONS = 1 << 22
BANDWIDTH_BYTES = 64 << 20  # of each of the two buffers: beyond the caches of the devices at hand
PATIENCE = 8  # launches
EMPTY_LAUNCHES = 500
_log = logging.getLogger(__name__)


def measured(device: Device, cache_dir: str | os.PathLike[str]) -> DeviceProfile:
    """The device's profile with its peaks: from a file below `cache_dir`, else measured and kept there.

    Takes a second or two the first time. The file is named by device and driver version; a damaged one is
    measured again. Raises DeviceError where a kernel fails or its figures are impossible.
    """
    kept = _kept(_path(device.profile, cache_dir), device.profile)
    if kept is not None:
        return replace(device.profile, peaks=kept)
    profile = replace(device.profile, peaks=measure(device))
    keep(profile, cache_dir)
    return profile


def known(device: Device, cache_dir: str | os.PathLike[str]) -> bool:
    """Whether `measured` has nothing to measure."""
    return _kept(_path(device.profile, cache_dir), device.profile) is not None


def keep(profile: DeviceProfile, cache_dir: str | os.PathLike[str]) -> None:
    """Keep a profile's peaks below `cache_dir` for `measured`; a warning is logged where that fails."""
    path = _path(profile, cache_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(profilefile.dumps(profile).encode())
    except (OSError, HonedError) as error:
        _log.warning("the measured peaks were not kept: %s", error)


def higher(one: DevicePeaks, other: DevicePeaks) -> DevicePeaks:
    """The best that either saw."""
    half = [rate for rate in (one.fp16_gflops, other.fp16_gflops) if rate is not None]
    return DevicePeaks(
        fp32_gflops=max(one.fp32_gflops, other.fp32_gflops),
        fp16_gflops=max(half, default=None),
        bandwidth_gbs=max(one.bandwidth_gbs, other.bandwidth_gbs),
        launch_us=min(one.launch_us, other.launch_us),
    )


def measure(device: Device) -> DevicePeaks:
    """Measure the peaks of `device` now."""
    with driver_call("measure the device's peaks"):
        properties = cl.command_queue_properties.PROFILING_ENABLE
        queue = cl.CommandQueue(context(device.cl), properties=properties)
        half = _arithmetic(device, queue, "half") if device.profile.limits.fp16 else None
        return DevicePeaks(
            fp32_gflops=_arithmetic(device, queue, "float"),
            fp16_gflops=half,
            bandwidth_gbs=_bandwidth(device, queue),
            launch_us=_launch_cost(device, queue),
        )


def _path(profile: DeviceProfile, cache_dir: str | os.PathLike[str]) -> Path:
    name = hashlib.sha256(repr(sorted(to_plain(profile.identity).items())).encode()).hexdigest()[:32]
    return Path(cache_dir) / "peaks" / f"{name}.toml"


def _kept(path: Path, profile: DeviceProfile) -> DevicePeaks | None:
    try:
        kept = profilefile.load(path)
    except NotFound:
        return None
    except ProfileError as error:
        _log.warning("the kept peaks are measured again: %s", error)
        return None
    return kept.peaks if kept.identity == profile.identity else None


def _arithmetic(device: Device, queue: Any, scalar: str) -> float:
    """GFLOP/s of multiply-adds in registers, over vector widths.

    `fma` is one instruction where the device has it; where it has not, `mad` at the best width is faster.
    """
    items = device.profile.limits.compute_units * GROUPS_PER_UNIT * GROUP
    sink = cl.Buffer(context(device.cl), cl.mem_flags.READ_WRITE, items * 4)

    def rate(function: str, width: int) -> float:
        kernel = cl.Kernel(_built(device, _arithmetic_source(scalar, width, function)), "arithmetic")
        iterations, seconds = _calibrated(queue, kernel, items, sink)
        few = max(1, iterations // SHORTER)
        each = min(seconds / iterations, _shortest(queue, kernel, items, sink, np.int32(few)) / few)
        return 2.0 * width * CHAINS * items / each

    fused = {width: rate("fma", width) for width in ARITHMETIC_WIDTHS}
    width = max(fused, key=lambda w: fused[w])
    return max(fused[width], rate("mad", width)) * 1e-9


def _calibrated(queue: Any, kernel: Any, items: int, sink: Any) -> tuple[int, float]:
    """How many iterations take about TARGET_SECONDS, and the shortest time they took."""
    iterations = 16
    _timed(queue, kernel, items, sink, np.int32(iterations))  # the first launch may compile
    while True:
        seconds = _timed(queue, kernel, items, sink, np.int32(iterations))
        if seconds >= TARGET_SECONDS / 4 or iterations >= MAX_ITERATIONS:
            break
        growth = TARGET_SECONDS / seconds if seconds > TARGET_SECONDS / 64 else 16.0
        iterations = min(int(iterations * min(growth, 16.0)) + 1, MAX_ITERATIONS)
    return iterations, _shortest(queue, kernel, items, sink, np.int32(iterations))


def _arithmetic_source(scalar: str, width: int, function: str) -> str:
    kind = scalar if width == 1 else f"{scalar}{width}"
    chains = range(CHAINS)
    start = " ".join(f"{kind} a{i} = ({kind})(({scalar})({i} + (int)get_local_id(0)));" for i in chains)
    step = " ".join(f"a{i} = {function}(a{i}, b, c);" for i in chains)
    total = " + ".join(f"a{i}" for i in chains)
    components = "total" if width == 1 else " + ".join(f"total.s{i:x}" for i in range(width))
    # b and c depend on an argument, so that nothing can be computed ahead; the values converge to 1.
    return (
        f"__kernel void arithmetic(__global float* sink, int n) {{ {start}"
        f" const {kind} b = ({kind})(({scalar})(n > 0 ? 0.5f : 0.25f)), c = ({kind})(({scalar})0.5f);"
        f" for (int i = 0; i < n; ++i) {{ {step} }}"
        f" const {kind} total = {total}; sink[get_global_id(0)] = (float)({components}); }}\n"
    )


def _bandwidth(device: Device, queue: Any) -> float:
    """GB/s of copying one large buffer to another and of reading one, over vector widths."""
    limits = device.profile.limits
    size = min(BANDWIDTH_BYTES, limits.max_alloc_bytes // 2, limits.global_mem_bytes // 8) // 65536 * 65536
    if size == 0:
        raise DeviceError(f"{device.spec} has too little memory to measure its bandwidth")
    program = _built(device, "".join(_bandwidth_source(width) for width in BANDWIDTH_WIDTHS))
    flags = cl.mem_flags.READ_WRITE
    source, target = (cl.Buffer(context(device.cl), flags, size) for _ in range(2))
    cl.enqueue_fill_buffer(queue, source, np.float32(1), 0, size)
    best = 0.0
    for width in BANDWIDTH_WIDTHS:
        elements = size // (4 * width)
        for name, items, moved in (("copy", elements, 2 * size), ("read", elements // 16, size)):
            kernel = cl.Kernel(program, f"{name}{width}")
            best = max(best, moved / _shortest(queue, kernel, items, source, target))
    return best * 1e-9


def _bandwidth_source(width: int) -> str:
    kind = "float" if width == 1 else f"float{width}"
    loads = " + ".join(f"in[get_global_id(0) + {i} * get_global_size(0)]" for i in range(16))
    return (
        f"__kernel void copy{width}(__global const {kind}* in, __global {kind}* out)"
        f" {{ out[get_global_id(0)] = in[get_global_id(0)]; }}\n"
        f"__kernel void read{width}(__global const {kind}* in, __global {kind}* out)"
        f" {{ out[get_global_id(0)] = {loads}; }}\n"
    )


def _launch_cost(device: Device, queue: Any) -> float:
    """Microseconds from one empty kernel's start to the next one's in a long queue."""
    kernel = cl.Kernel(_built(device, "__kernel void empty(__global float* sink) { }"), "empty")
    sink = cl.Buffer(context(device.cl), cl.mem_flags.READ_WRITE, 64)  # kernels do not hold their buffers
    kernel.set_args(sink)
    cap = device.profile.rules.max_queued_launches
    count = min(EMPTY_LAUNCHES, cap) if cap else EMPTY_LAUNCHES
    best = float("inf")
    for _ in range(PATIENCE):
        events = [cl.enqueue_nd_range_kernel(queue, kernel, (1,), (1,)) for _ in range(count)]
        queue.finish()
        for event in events:
            event_seconds(event)  # each must have completed
        best = min(best, (events[-1].profile.end - events[0].profile.start) * 1e-3 / count)
    if not best > 0:
        raise DeviceError(f"{device.spec} reports no time for {count} launches; update its driver")
    return best


def _built(device: Device, source: str) -> Any:
    header = "#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n" if "half" in source else ""
    return cl.Program(context(device.cl), header + source).build(cache_dir=False)


def _shortest(queue: Any, kernel: Any, items: int, *args: Any) -> float:
    """Seconds of the fastest launch, tried until PATIENCE launches in a row were no faster.

    So a device that is clocking up, or busy with something else for a moment, still shows its peak.
    """
    best, stale = float("inf"), 0
    while stale < PATIENCE:
        seconds = _timed(queue, kernel, items, *args)
        stale = 0 if seconds < 0.99 * best else stale + 1
        best = min(best, seconds)
    return best


def _timed(queue: Any, kernel: Any, items: int, *args: Any) -> float:
    """Seconds of one launch; raises DeviceError where the device reports none."""
    kernel.set_args(*args)
    event = cl.enqueue_nd_range_kernel(queue, kernel, (items,), (GROUP,))
    event.wait()
    seconds = event_seconds(event)
    if not seconds > 0:
        raise DeviceError("the device reports no time for a kernel that ran; update its driver")
    return seconds
