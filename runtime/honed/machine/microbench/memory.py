"""How fast working sets of several sizes move: a small curve through the caches, and memory beyond them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from honed.machine.opencl import cl
from honed.protocol.errors import DeviceError

from .bench import Bench

_BEYOND_BYTES = 64 << 20  # of each of two buffers: in no cache of the devices at hand
_SIZES = tuple(64 << 10 << 2 * n for n in range(5))  # bytes of a working set: 64 KiB to 16 MiB
_WIDTHS = (1, 4, 16)  # floats of a load
_LOADS = 16  # of a work-item that only reads
_GROUP = 64  # work-items
_ITEMS_PER_UNIT = 256  # of the forms with few, long work-items, which suit CPUs


Way = Literal["copy", "read", "sweep"]
_WAYS: tuple[Way, ...] = ("copy", "read", "sweep")


@dataclass(frozen=True, slots=True)
class MemoryForm:
    """One way of moving memory: copying (both sides count), or summing up in short or in long work-items."""

    what: Way
    width: int

    @property
    def name(self) -> str:
        """The name of its kernel."""
        return f"{self.what}{self.width}"


FORMS = tuple(MemoryForm(what, width) for width in _WIDTHS for what in _WAYS)


def source(width: int) -> str:
    """The kernels of all forms for loads of `width` floats."""
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
    """GB/s by bytes of the working set, for sizes that caches may hold; and beyond all of them."""
    limits = bench.limits
    most = min(_BEYOND_BYTES, limits.max_alloc_bytes // 2, limits.global_mem_bytes // 8) // 65536 * 65536
    if most == 0:
        raise DeviceError(f"{bench.device.spec} has too little memory to measure its bandwidth")
    program = bench.built("".join(source(width) for width in _WIDTHS))
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
    """GB/s of a form that goes once through the first `nbytes` of the buffers; 0 where they are too few."""
    elements = nbytes // (4 * form.width)
    items = elements // _LOADS if form.what == "read" else elements
    each = 1
    if form.what == "sweep":
        # As many work-items as share the elements evenly, down to four elements each.
        items = min(bench.limits.compute_units * _ITEMS_PER_UNIT, elements // 4)
        each = elements // items // 4 * 4
    items = items // _GROUP * _GROUP
    if items == 0:
        return 0.0
    moved = {"copy": 2 * items, "read": _LOADS * items, "sweep": each * items}[form.what] * 4 * form.width
    return moved / bench.shortest(kernel, items, _GROUP, *buffers, np.uint32(each)) * 1e-9
