"""The blocked sketch for groups of many work-items: convolutions of tensors whose channels lie in blocks.

For Malis and GPUs. A work-item computes a rectangle of pixels for a few vectors of output channels, its
neighbours the rectangles beside it. For each row of the window it holds the piece of the image under its
rectangle, vectors of input channels, padded as it is loaded; every vector of weights is loaded once for
all its pixels. Results that were added for a tile to divide them are left out as it writes.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from honed.tuner.search.blocks import Keep, reads_along
from honed.tuner.search.parts import (
    BlockPart,
    SketchLimits,
    TileLoops,
    below,
    bind,
    contraction,
    launch_others,
    maker,
    sample_tile,
    set_private,
    sketch,
)

from .blocked import depthwise_of

MOST_BESIDE = 4  # vectors of channels that share the pixels
_MOST_PIXELS = 16  # of a work-item, along rows and along columns
_BOTH = 2  # a convolution and its tail
_ROWS = 2  # the axis of rows: images, blocks of channels, rows, columns, the channels of a block
_WINDOW_ROWS = 2  # how many axes of the sum end with the window's rows: blocks of channels, rows


@sketch(55)
def blocked_groups(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile a convolution of blocked tensors. False where the function is none."""
    found = None if limits.groups_of_one else contraction(schedule, Keep.PADDING)
    depthwise = depthwise_of(schedule, found[1][0], most) if found is not None else None
    if found is None or depthwise is None:
        return False
    before, rest = found
    main = rest[0].block
    loops = _split(schedule, rest[0], most_pixels(limits, most), depthwise=depthwise)
    schedule.reorder(*loops.in_order)
    under = bind(schedule, loops.groups, limits)
    tail, apart = _tail(schedule, rest)
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    held, before = _held(schedule, main, before)
    piece = loops.outside[-1] if loops.outside else under
    schedule.compute_at(held, piece, preserve_unit_loops=True)
    for block, place in ((tail, under), (held, piece)):
        *others, last = below(schedule, block, place)
        for loop in others:
            schedule.unroll(loop)
        if int(schedule.get(last).extent) == most:
            schedule.vectorize(last)
        else:  # an image in the model's own layout
            schedule.unroll(last)
    for loop in (*loops.inside, *loops.tile):
        schedule.unroll(loop)
    schedule.vectorize(loops.lanes)
    schedule.decompose_reduction(main, (*loops.outside, *loops.inside)[0])
    launch_others(schedule, before, apart, limits, most)
    return True


def _tail(schedule: Schedule, rest: list[BlockPart]) -> tuple[SBlockRV, list[BlockPart]]:
    """The block that writes results from registers, and the rest without what is computed with it."""
    main = rest[0]
    if len(rest) == _BOTH and all(
        kept <= made for kept, made in zip(rest[1].info.extents, main.info.extents, strict=False)
    ):
        set_private(schedule, main.block)
        return rest[1].block, rest[:1]
    return schedule.cache_write(main.block, 0, "local"), rest


def _held(schedule: Schedule, main: SBlockRV, before: list[BlockPart]) -> tuple[SBlockRV, list[BlockPart]]:
    """The block that brings an image into registers, padded where it must be, and what is left before."""
    (image, *_) = reads_along(schedule, main, _ROWS)
    part = maker(schedule, main, image, before)
    if part is None:
        return schedule.cache_read(main, image, "local"), before
    set_private(schedule, part.block)
    return part.block, [one for one in before if one is not part]


def most_pixels(limits: SketchLimits, lanes: int) -> int:
    """Vectors of results that a work-item holds at most."""
    return min(_MOST_PIXELS, limits.accumulators // lanes)


def _split(schedule: Schedule, main: BlockPart, pixels: int, *, depthwise: bool) -> TileLoops:
    """Split the axes; how large the rectangle is, is left open."""
    images, channels, rows, columns, lanes, *reduced = schedule.get_loops(main.block)
    channels, beside, _ = sample_tile(schedule, channels, 1 if depthwise else MOST_BESIDE)
    rows, down, _ = sample_tile(schedule, rows, pixels)
    columns, across, _ = sample_tile(schedule, columns, pixels)
    outside = 0 if depthwise else _WINDOW_ROWS
    return TileLoops(
        groups=[images, channels, rows, columns],
        outside=reduced[:outside],
        inside=reduced[outside:],
        tile=[down, across, beside],
        lanes=lanes,
    )
