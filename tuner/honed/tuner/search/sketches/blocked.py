"""The blocked sketch: convolutions of tensors whose channels lie in blocks.

For processors. A work-item computes a rectangle of pixels for a few vectors of output channels. Each vector
of weights is loaded once for all pixels of the rectangle, each pixel broadcast once for all vectors; of a
depthwise convolution pixels are vectors as weights are. What the rectangle needs of the image is padded in
private memory, block by block of input channels, and read again for each step of the window.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from honed.tuner.search.blocks import Keep, reads_along
from honed.tuner.search.parts import (
    BlockPart,
    SketchLimits,
    TileLoops,
    accumulate,
    below,
    contraction,
    fuse,
    launch_others,
    sample_tile,
    set_private,
    sketch,
)

_AXES = 5  # of the result: images, blocks of channels, rows, columns, the channels of a block
_WINDOW_AXES = 2
MOST_VECTORS = 28  # of accumulators: of 32 registers, the others hold weights and pixels
MOST_BESIDE = 4  # vectors of channels that share the pixels


@sketch(50)
def blocked(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile a convolution of blocked tensors. False where the function is none."""
    found = contraction(schedule, Keep.PADDING) if limits.groups_of_one else None
    depthwise = depthwise_of(schedule, found[1][0], most) if found is not None else None
    if found is None or depthwise is None:
        return False
    before, rest = found
    main = rest[0]
    loops = _split(schedule, main, limits, depthwise=depthwise)
    schedule.reorder(*loops.in_order)
    group = fuse(schedule, loops.groups)
    schedule.bind(group, "blockIdx.x")
    tail = accumulate(schedule, rest)
    schedule.reverse_compute_at(tail, group, preserve_unit_loops=True)
    *written, lanes = below(schedule, tail, group)
    for loop in (*written, *loops.inside, *loops.tile):
        schedule.unroll(loop)
    schedule.vectorize(lanes)
    schedule.vectorize(loops.lanes)
    padded = [part for part in before if _is_block(part, most)]
    for part in padded:
        schedule.compute_at(part.block, group if depthwise else loops.outside[0], preserve_unit_loops=True)
        set_private(schedule, part.block)
        schedule.vectorize(schedule.get_loops(part.block)[-1])
    schedule.decompose_reduction(main.block, loops.outside[0])
    launch_others(schedule, [p for p in before if p not in padded], rest, limits, most)
    return True


def depthwise_of(schedule: Schedule, main: BlockPart, lanes: int) -> bool | None:
    """Whether a blocked convolution is of each channel by itself; None where it is none."""
    extents, spatial = main.info.extents, main.info.spatial
    if spatial != list(range(_AXES)) or extents[_AXES - 1] != lanes or len(extents) < _AXES + 2:
        return None
    reads = [frozenset(reads_along(schedule, main.block, n)) for n in spatial]
    _, channels, *pixels, lane = reads
    if len(schedule.get(main.block).reads) != 2 or pixels[0] != pixels[1] or len(pixels[0]) != 1:
        return None
    (weights,) = {0, 1} - pixels[0]
    if weights not in lane or channels != lane:
        return None
    return len(lane) == 2


def _is_block(part: BlockPart, lanes: int) -> bool:
    return len(part.info.extents) == _AXES and part.info.extents[-1] == lanes


def _split(schedule: Schedule, main: BlockPart, limits: SketchLimits, *, depthwise: bool) -> TileLoops:
    """Split the axes; how large the rectangle is, is left open."""
    images, channels, rows, columns, lanes, *summed = schedule.get_loops(main.block)
    channels, beside, _ = sample_tile(schedule, channels, 1 if depthwise else MOST_BESIDE)
    rows, down, _ = sample_tile(schedule, rows, MOST_VECTORS)
    columns, across, _ = sample_tile(schedule, columns, MOST_VECTORS)
    if not depthwise:  # of a window's steps no pixel is kept for the next: registers hold the sums
        blocks, *window = summed
        summed = [blocks, *window] if len(window) > _WINDOW_AXES else [*window, blocks]
        outer, inside, _ = sample_tile(schedule, summed[-1], limits.unroll)
        summed = [*summed[:-1], outer, inside]
    return TileLoops(
        groups=[images, rows, channels, columns],
        outside=summed[:-1],
        inside=summed[-1:],
        tile=[down, across, beside],
        lanes=lanes,
    )
