"""The pointwise sketch: a few pixels of a flat image for a vector of output channels.

For convolutions without a window over images that no vector divides, on devices whose compilers load vectors
only where they are aligned. So vectors are of output channels: a launch before lays the weights out in them,
and pixels are loaded one by one. The last work-item along the image reads zeros in the place of pixels that
are missing, and does not write them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.tuner.lower.operands import ALIGNED_PIXELS
from honed.tuner.search.decisions import Drawn, busiest, divisors, off_usual, whole_warps
from honed.tuner.search.packing import PIXELS, channels_last, flatten, launch_packing, pack
from honed.tuner.search.parts import (
    Keep,
    SketchLimits,
    accumulate,
    below,
    by_single_items,
    contraction,
    fuse,
    lanes_of,
    reads_along,
    sample_tile,
    sketch,
)

_CHANNELS = 1  # the axis of output channels
_ACCUMULATORS = 40  # more spill, those of a sum that is added up twice not counted
_LINE = 64  # bytes
_WARP = 16


@dataclass(frozen=True, slots=True)
class _Loops:
    """The loops of a convolution that blocks are computed under or written out."""

    across: LoopRV  # work-items; what one computes is under it
    outside: LoopRV  # of the sum
    steps: LoopRV  # of the sum, written out; operands are held under it
    pixels: LoopRV
    lanes: LoopRV


@sketch(30)
def pointwise(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile a convolution over flat pixels. False where the function is none."""
    found = contraction(schedule, Keep.PADDING) if by_single_items(limits) else None
    rest = flatten(schedule, *found) if found is not None else None
    if rest is None or rest[0].extents[PIXELS] % ALIGNED_PIXELS == 0:
        return False
    main, extents = rest[0].block, rest[0].extents
    lanes = lanes_of(extents[_CHANNELS], most)
    if lanes == 1:
        return False
    (image,) = reads_along(schedule, main, PIXELS)
    size = int(schedule.get(main).reads[image].source.dtype.bits) // 8
    pixels = _pixels(extents[PIXELS], lanes, size)
    tail = accumulate(schedule, rest)
    held = _pad(schedule, main, image, pixels)
    (image,) = reads_along(schedule, main, PIXELS)
    weights = pack(schedule, main, 1 - image, _CHANNELS, lanes)
    channels_last(schedule, rest[0], _CHANNELS, lanes)
    loops = _split(schedule, main, limits, lanes, pixels)
    under = loops.across
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    schedule.compute_at(held, loops.steps, preserve_unit_loops=True)
    vectors = schedule.cache_read(main, 1 - image, "local")
    schedule.compute_at(vectors, loops.steps, preserve_unit_loops=True)
    *others, vector = below(schedule, vectors, loops.steps)
    written_out = (*below(schedule, tail, under), *below(schedule, held, loops.steps), *others)
    for loop in (*written_out, loops.steps, loops.pixels):
        schedule.unroll(loop)
    for loop in (vector, loops.lanes):
        schedule.vectorize(loop)
    schedule.decompose_reduction(main, loops.outside)
    launch_packing(schedule, weights, lanes, limits)
    return True


def _pixels(image: int, lanes: int, size: int) -> int:
    """Pixels of a work-item: as many as have its warp touch the fewest lines for the whole image.

    Elements have `size` bytes; each pixel is a line, as are so many lanes of a vector as fill it.
    """
    lines = _WARP * lanes * size // _LINE
    return min(range(1, _ACCUMULATORS // lanes + 1), key=lambda n: -(-image // n) * (lines + n))


def _pad(schedule: Schedule, main: SBlockRV, image: int, pixels: int) -> SBlockRV:
    """Have the image end with a whole tile; returns the block that holds it, with zeros behind, in registers.

    What the convolution makes of those is not copied to where its results are read.
    """
    schedule.pad_einsum(main, [1, 1, pixels, 1])
    padded = schedule.get_producers(main)
    if not padded:  # it ends with one
        return schedule.cache_read(main, image, "local")
    (cropped,) = schedule.get_consumers(main)
    schedule.compute_inline(cropped)
    schedule.set_scope(padded[0], 0, "local")
    return padded[0]


def _split(schedule: Schedule, main: SBlockRV, limits: SketchLimits, lanes: int, pixels: int) -> _Loops:
    """Split the axes: channels and images along y, pixels along x; how many work-items is left open."""
    images, channels, places, summed = schedule.get_loops(main)
    channels, vector = schedule.split(channels, [None, lanes])
    channels, down, _ = sample_tile(schedule, channels, max(limits.threads))
    places, tile = schedule.split(places, [None, pixels])
    places, across, _ = sample_tile(schedule, places, max(limits.threads))
    outside, steps, _ = sample_tile(schedule, summed, limits.unroll)
    schedule.reorder(images, channels, places, down, across, outside, steps, tile, vector)
    groups = [fuse(schedule, [images, channels]), places]
    for loop, tag in zip(groups, ("blockIdx.y", "blockIdx.x"), strict=True):
        schedule.bind(loop, tag)
    for loop, tag in zip((down, across), ("threadIdx.y", "threadIdx.x"), strict=True):
        schedule.bind(loop, tag)
    return _Loops(across, outside, steps, tile, vector)


# ---- Work-groups of the sketch `pointwise` that do well on Malis, told from extents alone. Pure ----
#
# The sketch settles a work-item's tile; left are its groups, which should give all cores as much to do, and
# the steps of the sum that are written out, as many as may be.


def point_groups(sketch: Drawn) -> Drawn | None:
    """The sketch with its best groups; None where it is of another kind."""
    if "PadEinsum" not in sketch.names or len(sketch.tiles) != 3:
        return None
    (at_down, down), (at_across, across), (at_steps, steps) = sketch.tiles
    items = down.extent * across.extent
    groups = [
        (high, wide)
        for high in divisors(down.extent)
        for wide in divisors(across.extent)
        if high * wide <= across.most and whole_warps(high * wide, items)
    ]
    if not groups:
        return None
    high, wide = min(groups, key=lambda group: _rank(math.prod(group), group[1], items))
    written_out = max(n for n in divisors(steps.extent) if n <= steps.most)
    return sketch.with_most(
        {at_down: down.cut(high), at_across: across.cut(wide), at_steps: steps.cut(written_out)}
    )


def _rank(group: int, wide: int, items: int) -> tuple[float, ...]:
    """By what the busiest core runs, then by how far the group is from the usual one; wide ones first."""
    return busiest(group, items), off_usual(group), -wide
