"""The tile sketch: one work-item computes a tile of the output in registers.

For contractions (dense, batched matmul, convolution, pooling) and single reductions. The lanes of the tile's
vectors run along one axis of the output. The last one gives contiguous loads and stores; another one (the
channels of a convolution) is better where the last has an odd extent, or where the edge of a padded input
would make the lanes of one vector differ.

Beside it is the sketch of Winograd's convolutions, `points`: a work-item transforms whole tiles of an image.
"""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.tuner.lower.functions.winograd import IMAGE, POINTS, STEP
from honed.tuner.search.parts import (
    CHOICES,
    BlockInfo,
    Keep,
    SketchLimits,
    accumulate,
    alone,
    below,
    bind,
    by_single_items,
    calls,
    fuse,
    is_contraction,
    lanes_of,
    launch_others,
    parts,
    reads_along,
    require,
    sample_tile,
    sketch,
    unroll,
    vectorise,
    write_out,
)


@sketch(80)
def tile(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Put lanes along the last axis, and inline everything elementwise."""
    found = parts(schedule)
    _require_tile(schedule, found, limits)
    # A vector whose lanes choose differently is split into its elements
    require(not calls(schedule, found[0].block, CHOICES))
    _tile(schedule, found, limits, most, laned=len(found[0].spatial) - 1)


@sketch(100)
def tile_padded(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Put lanes along the last axis of an input that a separate launch pads first."""
    found = parts(schedule, Keep.PADDING)
    before = 0
    while before < len(found) and not found[before].is_reduction:
        before += 1
    require(before > 0)
    _require_tile(schedule, found[before:], limits)
    for part in found[:before]:
        alone(schedule, part, limits, most)
    _tile(schedule, found[before:], limits, most, laned=len(found[before].spatial) - 1)


@sketch(90)
def tile_across(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Put lanes along an axis before the last, where the last has none.

    This applies only where a single operand depends on that axis. Where there is another (the image, beside a
    convolution's weights), each element of the first is gathered once and used for the whole tile.
    """
    found = parts(schedule)
    _require_tile(schedule, found, limits)
    block, what = found[0].block, found[0]
    spatial = what.spatial
    require(len(spatial) > 1)
    widths = [lanes_of(what.extents[axis], most) for axis in spatial]
    laned = max(range(len(spatial) - 1), key=lambda n: widths[n])
    require(widths[laned] > 1)
    require(widths[-1] < widths[laned] or calls(schedule, block, CHOICES))
    gathered = reads_along(schedule, block, spatial[laned])
    require(len(gathered) == 1)
    shared = len(schedule.get(block).reads) > 1
    # Precedes `_tile`, which decomposes the sum; that is then the first of the block's reads.
    operand = schedule.cache_read(block, gathered[0], "local") if shared else None
    unrolled = _tile(schedule, found, limits, most, laned=laned)
    if operand is not None:
        schedule.compute_at(operand, unrolled, preserve_unit_loops=True)
        _, vector = schedule.split(fuse(schedule, below(schedule, operand, unrolled)), [None, widths[laned]])
        schedule.vectorize(vector)


def _require_tile(schedule: Schedule, blocks: list[BlockInfo], limits: SketchLimits) -> None:
    """Raise NotApplicable unless blocks are a reduction that leaves something, perhaps with a tail."""
    require([p.is_reduction for p in blocks] in ([True], [True, False]) and bool(blocks[0].spatial))
    require(limits.contractions or not is_contraction(schedule, blocks))


def _tile(
    schedule: Schedule, blocks: list[BlockInfo], limits: SketchLimits, most: int, *, laned: int
) -> LoopRV:
    """Tile the reduction with its lanes along the spatial axis number `laned`.

    Return the innermost loop of the reduction, above the tile.
    """
    block, what = blocks[0].block, blocks[0]
    loops = schedule.get_loops(block)
    reduce = [loops[n] for n in what.reducing]
    lanes = lanes_of(what.extents[what.spatial[laned]], most)
    outer, inner = _split(schedule, loops, what, laned, lanes, limits)
    reduce[-1], unrolled, _ = sample_tile(schedule, reduce[-1], limits.unroll)
    schedule.reorder(*outer, *reduce, unrolled, *inner)
    under = bind(schedule, outer, limits)
    tail = accumulate(schedule, blocks)
    last = laned == len(what.spatial) - 1
    if not last:
        _lanes_last(schedule, block, laned, len(what.spatial))
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    vectorise(schedule, tail, under, lanes if last else 1, limits)
    write_out(schedule, [unrolled, *inner])
    schedule.decompose_reduction(block, reduce[0])
    launch_others(schedule, [], blocks, limits, most)
    return unrolled


def _lanes_last(schedule: Schedule, block: SBlockRV, laned: int, axes: int) -> None:
    """Keep the accumulators with the laned axis last, so that a vector of them is one vector."""

    def order(*indices: tirx.Var) -> list[tirx.Var]:
        return [index for n, index in enumerate(indices) if n != laned] + [indices[laned]]

    if len(schedule.get(block).writes[0].source.shape) != axes:
        raise ValueError("the result has other axes than the block")
    schedule.transform_layout(block, ("write", 0), order)


def _split(
    schedule: Schedule, loops: list[LoopRV], what: BlockInfo, laned: int, lanes: int, limits: SketchLimits
) -> tuple[list[LoopRV], list[LoopRV]]:
    """Return the loops that the grid covers, and the tile of a work-item, whose last loop is the lanes."""
    outer: list[LoopRV] = []
    inner: list[LoopRV] = []
    for n, axis in enumerate(what.spatial):
        if n == laned:
            continue
        if what.extents[axis] == 1:
            outer.append(loops[axis])
            continue
        a, b, _ = sample_tile(schedule, loops[axis], limits.tile)
        outer.append(a)
        inner.append(b)
    last, vector = schedule.split(loops[what.spatial[laned]], [None, lanes])
    a, b, _ = sample_tile(schedule, last, limits.vectors)
    outer.insert(laned, a)
    return outer, [*inner, b, vector]


def points(schedule: Schedule, limits: SketchLimits) -> None:
    """Give each work-item a channel's tile, for Winograd's convolutions.

    All points of a tile are made of the same pixels, and all pixels of the same points: each is loaded once.
    """
    require(by_single_items(limits))
    found = parts(schedule)
    require(len(found) == 1 and not found[0].is_reduction)
    block = found[0].block
    loops = list(schedule.get_loops(block))
    if found[0].name == IMAGE:
        outer, inner = loops[1:], loops[:1]
    else:
        require(_reads_points(schedule, block))
        outer, inner = loops[:-2], list[LoopRV]()
        for loop in loops[-2:]:
            tiles, pixels = schedule.split(loop, [None, STEP])
            outer.append(tiles)
            inner.append(pixels)
    schedule.reorder(*outer, *inner)
    bind(schedule, outer, limits)
    unroll(schedule, inner)


def _reads_points(schedule: Schedule, block: SBlockRV) -> bool:
    """Return whether the block reads all points of tiles for each of its pixels."""
    found = schedule.get(block)
    images = len(found.writes[0].source.shape) == len("nchw")
    firsts = [read.region[0].extent for read in found.reads if read.region]  # A scalar has no axis
    return images and any(isinstance(each, tirx.IntImm) and int(each) == POINTS for each in firsts)
