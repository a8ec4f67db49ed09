"""Microbenchmarks: measure a device's peaks by its own clock.

Devices differ, so several forms of each kernel are tried and the best counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from honed.machine.devices import Device
from honed.machine.opencl import cl, context, driver_call, event_seconds
from honed.machine.processors import OtherLoadMeter
from honed.machine.profile import DeviceLimits, DevicePeaks
from honed.protocol.errors import DeviceError

PATIENCE = 8  # Launches without improvement before a measurement ends


class Bench:
    """A device, opened for measuring.

    Its methods raise pyopencl's errors, and DeviceError if the device's clock is unusable.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.limits: DeviceLimits = device.profile.limits
        self.context = context(device.cl)
        properties = cl.command_queue_properties.PROFILING_ENABLE
        self.queue = cl.CommandQueue(self.context, properties=properties)

    def build(self, source: str) -> Any:
        """Return the pyopencl Program built from `source`."""
        header = "#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n" if "half" in source else ""
        return cl.Program(self.context, header + source).build(cache_dir=False)

    def buffer(self, nbytes: int) -> Any:
        """Return a new pyopencl Buffer of `nbytes` bytes that kernels may read and write."""
        return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, nbytes)

    def seconds(self, kernel: Any, items: int, group: int, *args: Any) -> float:
        """Return the seconds that one launch ran by the device's clock.

        Raises DeviceError if the device reports no time.
        """
        kernel.set_args(*args)
        event = cl.enqueue_nd_range_kernel(self.queue, kernel, (items,), (group,))
        event.wait()
        seconds = event_seconds(event)
        if not seconds > 0:
            raise DeviceError("the device reports no time for a kernel that ran; update its driver")
        return seconds

    def shortest(self, kernel: Any, items: int, group: int, *args: Any) -> float:
        """Return the seconds of the fastest launch; stop after PATIENCE launches without improvement.

        So a device whose clock is rising, or that is busy for a moment, still shows its peak.
        """
        best, stale = float("inf"), 0
        while stale < PATIENCE:
            seconds = self.seconds(kernel, items, group, *args)
            stale = 0 if seconds < 0.99 * best else stale + 1
            best = min(best, seconds)
        return best


_LAUNCHES = 500


def empty_kernels(bench: Bench) -> tuple[float, float]:
    """Return two least times of empty kernels in a long queue, in microseconds.

    The first is from one start to the next, which the host limits on a fast device; the second from START to
    END of one. Raises DeviceError if the device reports no time for all of them.
    """
    kernel = cl.Kernel(bench.build("__kernel void empty(__global float* sink) { }"), "empty")
    sink = bench.buffer(64)  # Kernels do not hold their buffers
    kernel.set_args(sink)
    cap = bench.device.profile.rules.max_queued_launches
    count = min(_LAUNCHES, cap) if cap else _LAUNCHES
    apart = alone = float("inf")
    for _ in range(PATIENCE):
        events = [cl.enqueue_nd_range_kernel(bench.queue, kernel, (1,), (1,)) for _ in range(count)]
        bench.queue.finish()
        alone = min(alone, *(event_seconds(event) for event in events))  # Raises unless each completed
        apart = min(apart, (events[-1].profile.end - events[0].profile.start) * 1e-3 / count)
    if not apart > 0:
        raise DeviceError(f"{bench.device.spec} reports no time for {count} launches; update its driver")
    return apart, alone * 1e6


# Good forms differ: a CPU needs vectors as wide as its registers, and as many independent chains as its units
# hold in flight, yet no more than it has registers; a GPU needs few registers a work-item. Independent
# accumulators by width of vectors: units of latency 4 with two pipes need 8 in flight.
_CHAINS = {1: (8,), 2: (8,), 4: (4, 8, 12), 8: (4, 8, 12), 16: (4, 8, 12)}
_UNROLLED = 4  # Steps of all chains in one iteration of the loop, to hide the loop's own cost
_GROUPS = (64, 256)  # Work-items
_ITEMS_PER_UNIT = 2048  # Work-items that the largest compute units hold at once
_SHORT_SECONDS = 1e-3  # Seconds of a launch in the first round
_SHORT_TRIES = 3
_LONG_SECONDS = 0.02  # Seconds of a final launch: enough for a clock to rise, too short for any watchdog
_SHORTER = 16  # A launch shorter by this factor fits between the interruptions of a busy CPU
_FINALISTS = 2
_MOST_ITERATIONS = 1 << 22


@dataclass(frozen=True, slots=True)
class ArithmeticForm:
    """A kernel form that keeps the device busy.

    `fma` is one instruction or, on some devices, slower than `mad`.
    """

    width: int  # Width of its vectors
    chains: int
    function: Literal["fma", "mad"] = "fma"
    group: int = _GROUPS[0]  # Work-items of a work-group

    @property
    def name(self) -> str:
        """The name of its kernel, which does not depend on the work-group."""
        return f"{self.function}_{self.width}_{self.chains}"

    def operations(self, items: int) -> float:
        """Return the operations of `items` work-items in one iteration of the loop; a multiply-add is two."""
        return 2.0 * self.width * self.chains * _UNROLLED * items


def forms(accumulators: int) -> list[ArithmeticForm]:
    """Return the arithmetic forms to try first on a device that spills beyond `accumulators` scalars."""
    return [
        ArithmeticForm(width, n)
        for width, chains in _CHAINS.items()
        for n in chains
        if width * n <= accumulators
    ]


def finalists(rates: dict[ArithmeticForm, float], largest_group: int) -> list[ArithmeticForm]:
    """Return the forms for the final round: the best of the first round, and variants of the very best."""
    first, *others = sorted(rates, key=lambda form: -rates[form])[:_FINALISTS]
    larger = [replace(first, group=group) for group in _GROUPS[1:] if group <= largest_group]
    return [first, replace(first, function="mad"), *larger, *others]


def arithmetic_source(form: ArithmeticForm, scalar: str) -> str:
    """Return the OpenCL source of the kernel of an arithmetic form; `scalar` is "float" or "half"."""
    kind = scalar if form.width == 1 else f"{scalar}{form.width}"
    chains = range(form.chains)
    start = " ".join(f"{kind} a{i} = ({kind})(({scalar})({i} + (int)get_local_id(0)));" for i in chains)
    step = " ".join(f"a{i} = {form.function}(a{i}, b, c);" for i in chains)
    total = " + ".join(f"a{i}" for i in chains)
    components = "total" if form.width == 1 else " + ".join(f"total.s{i:x}" for i in range(form.width))
    # Both b and c depend on an argument, so that nothing can be computed ahead; the values converge to 1.
    return (
        f"__kernel void {form.name}(__global float* sink, int n) {{ {start}"
        f" const {kind} b = ({kind})(({scalar})(n > 0 ? 0.5f : 0.25f)), c = ({kind})(({scalar})0.5f);"
        f" for (int i = 0; i < n; ++i) {{ {' '.join([step] * _UNROLLED)} }}"
        f" const {kind} total = {total}; sink[get_global_id(0)] = (float)({components}); }}\n"
    )


def gflops(bench: Bench, scalar: str) -> float:
    """Return GFLOP/s of the best arithmetic form."""
    items = bench.limits.compute_units * _ITEMS_PER_UNIT
    sink = bench.buffer(items * 4)
    tried = forms(bench.device.profile.family.accumulators)
    try:
        program = bench.build("".join(arithmetic_source(form, scalar) for form in tried))
    except cl.Error:  # Library libclc 22 lacks fma for devices without the instruction
        tried = [replace(form, function="mad") for form in tried]
        program = bench.build("".join(arithmetic_source(form, scalar) for form in tried))
    rates = {form: _quick(bench, cl.Kernel(program, form.name), form, items, sink) for form in tried}
    last = finalists(rates, bench.limits.max_work_group_size)
    sources = {form.name: arithmetic_source(form, scalar) for form in last}
    program = bench.build("".join(sources.values()))
    return max(_thorough(bench, cl.Kernel(program, form.name), form, items, sink) for form in last) * 1e-9


def _quick(bench: Bench, kernel: Any, form: ArithmeticForm, items: int, sink: Any) -> float:
    iterations = _calibrate(bench, kernel, form, items, sink, _SHORT_SECONDS)
    tries = [
        bench.seconds(kernel, items, form.group, sink, np.int32(iterations)) for _ in range(_SHORT_TRIES)
    ]
    return form.operations(items) * iterations / min(tries)


def _thorough(bench: Bench, kernel: Any, form: ArithmeticForm, items: int, sink: Any) -> float:
    long = _calibrate(bench, kernel, form, items, sink, _LONG_SECONDS)
    each = [
        bench.shortest(kernel, items, form.group, sink, np.int32(iterations)) / iterations
        for iterations in (long, max(1, long // _SHORTER))
    ]
    return form.operations(items) / min(each)


def _calibrate(bench: Bench, kernel: Any, form: ArithmeticForm, items: int, sink: Any, wanted: float) -> int:
    """Return the number of iterations that take about `wanted` seconds."""
    iterations = 1
    bench.seconds(kernel, items, form.group, sink, np.int32(iterations))  # The first launch may compile
    while True:
        seconds = bench.seconds(kernel, items, form.group, sink, np.int32(iterations))
        if seconds >= wanted / 4 or iterations >= _MOST_ITERATIONS:
            return iterations
        growth = wanted / seconds if seconds > wanted / 64 else 16.0
        iterations = min(int(iterations * min(growth, 16.0)) + 1, _MOST_ITERATIONS)


_BEYOND_BYTES = 64 << 20  # Bytes of each of two buffers: more than any cache of the devices at hand
_SIZES = tuple(64 << 10 << 2 * n for n in range(5))  # Bytes of a working set: 64 KiB to 16 MiB
_WIDTHS = (1, 4, 16)  # Floats of a load
_LOADS = 16  # Loads of a work-item that only reads
_GROUP = 64  # Work-items
_FEW_ITEMS_PER_UNIT = 256  # Work-items of the forms with few, long ones, which suit CPUs


Way = Literal["copy", "read", "sweep"]
_WAYS: tuple[Way, ...] = ("copy", "read", "sweep")


@dataclass(frozen=True, slots=True)
class MemoryForm:
    """A kernel form that moves memory: copies (both sides count), or sums in short or in long work-items."""

    what: Way
    width: int

    @property
    def name(self) -> str:
        """The name of its kernel, after kind and width."""
        return f"{self.what}{self.width}"


FORMS = tuple(MemoryForm(what, width) for width in _WIDTHS for what in _WAYS)


def memory_source(width: int) -> str:
    """Return the OpenCL source of the kernels of all memory forms for loads of `width` floats."""
    kind = "float" if width == 1 else f"float{width}"
    loads = " + ".join(f"in[get_global_id(0) + {i} * get_global_size(0)]" for i in range(_LOADS))
    return (
        f"__kernel void copy{width}(__global const {kind}* in, __global {kind}* out, uint each)"
        f" {{ out[get_global_id(0)] = in[get_global_id(0)]; }}\n"
        f"__kernel void read{width}(__global const {kind}* in, __global {kind}* out, uint each)"
        f" {{ out[get_global_id(0)] = {loads}; }}\n"
        # Four sums, as an addition takes longer than a load.
        f"__kernel void sweep{width}(__global const {kind}* in, __global {kind}* out, uint each) {{"
        f" {kind} a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;"
        f" __global const {kind}* mine = in + (size_t)get_global_id(0) * each;"
        f" for (uint i = 0; i < each; i += 4)"
        f" {{ a += mine[i]; b += mine[i + 1]; c += mine[i + 2]; d += mine[i + 3]; }}"
        f" out[get_global_id(0)] = a + b + c + d; }}\n"
    )


def gbs(bench: Bench) -> tuple[tuple[tuple[int, float], ...], float]:
    """Return GB/s by bytes of the working set, for sizes that caches may hold, and GB/s beyond all caches."""
    limits = bench.limits
    most = min(_BEYOND_BYTES, limits.max_alloc_bytes // 2, limits.global_mem_bytes // 8) // 65536 * 65536
    if most == 0:
        raise DeviceError(f"{bench.device.spec} has too little memory to measure its bandwidth")
    program = bench.build("".join(memory_source(width) for width in _WIDTHS))
    kernels = {form: cl.Kernel(program, form.name) for form in FORMS}
    buffers = bench.buffer(most), bench.buffer(most)
    cl.enqueue_fill_buffer(bench.queue, buffers[0], np.float32(1), 0, most)
    main = max(_rate(bench, kernels[form], form, most, buffers) for form in FORMS)
    caches = []
    for size in _SIZES:
        if size <= most:
            # A copy's working set is both buffers.
            rates = [
                _rate(bench, kernels[form], form, size // 2 if form.what == "copy" else size, buffers)
                for form in FORMS
            ]
            caches.append((size, max(rates)))
    return tuple(caches), main


def _rate(bench: Bench, kernel: Any, form: MemoryForm, nbytes: int, buffers: tuple[Any, Any]) -> float:
    """Return GB/s of one pass of a form over the first `nbytes` of the buffers; 0 for too few bytes."""
    elements = nbytes // (4 * form.width)
    items = elements // _LOADS if form.what == "read" else elements
    each = 1
    if form.what == "sweep":
        # The elements are shared evenly, with at least four elements for each work-item.
        items = min(bench.limits.compute_units * _FEW_ITEMS_PER_UNIT, elements // 4)
        each = elements // items // 4 * 4
    items = items // _GROUP * _GROUP
    if items == 0:
        return 0.0
    moved = {"copy": 2 * items, "read": _LOADS * items, "sweep": each * items}[form.what] * 4 * form.width
    return moved / bench.shortest(kernel, items, _GROUP, *buffers, np.uint32(each)) * 1e-9


def measure(device: Device) -> DevicePeaks:
    """Return the peaks of `device`, measured now; raise DeviceError if a kernel or the clock fails."""
    others = OtherLoadMeter((os.getpid(),))
    with driver_call("measure the device's peaks"):
        bench = Bench(device)
        half = gflops(bench, "half") if device.profile.limits.fp16 else None
        single = gflops(bench, "float")
        caches, main = gbs(bench)
        launch_us, empty_us = empty_kernels(bench)
    percent = others.percent()
    return DevicePeaks(
        fp32_gflops=single,
        fp16_gflops=half,
        bandwidth_gbs=main,
        launch_us=launch_us,
        empty_us=empty_us,
        caches_gbs=caches,
        busy=None if percent is None else percent / 100,
    )
