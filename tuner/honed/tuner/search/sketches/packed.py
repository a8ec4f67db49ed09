"""The packed sketch: convolutions with weights packed by output channels and an image in aligned rows.

For devices whose compilers load every operand where it stands, and load vectors only where they are aligned.
Two launches go before: one lays the weights out with as many output channels innermost as a vector has lanes,
one pads the image and cuts its rows into vectors. A work-item then computes a rectangle of pixels for a
vector of channels: for each input channel it holds the piece of the image under the rectangle in registers,
and every vector of weights that it loads is multiplied with all pixels of the rectangle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.tuner.search.packing import channels_last, launch_packing, pack
from honed.tuner.search.parts import (
    COPIED,
    BlockPart,
    Keep,
    SketchLimits,
    TileLoops,
    accumulate,
    below,
    bind_copied,
    by_single_items,
    contraction,
    fuse,
    lanes_of,
    launch_others,
    maker,
    reads_along,
    sample_tile,
    sketch,
    step_along,
    vectorise,
    write_out,
)

_MOST_STEPS = 200  # that are written out: 5 x 5 of a window for 8 pixels
_MOST_ROWS = 2  # of a work-item's rectangle
_IMAGE_VECTOR = 4  # most elements of a vector of the image: longer ones end beyond what is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedConvolution:
    """What is convolved: the numbers of axes and of reads, and how rows are cut."""

    main: BlockPart
    image: int
    weights: int
    batch: list[int]
    channel: int
    rows: list[int]  # the pixels' axes but for the last
    last: int
    lanes: int  # channels of a vector
    vector: int  # elements of a vector of the image
    pixels: int  # along a row that begin and end with a vector, or the whole row


@sketch(20)
def packed(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile a convolution, its operands laid out before. False where the function is none."""
    found = contraction(schedule, Keep.PADDING) if by_single_items(limits) else None
    if found is None:
        return False
    before, rest = found
    what = _understood(schedule, rest[0], limits, most)
    if what is None:
        return False
    image = _image(schedule, what, before)
    main = what.main.block
    weights = pack(schedule, main, what.weights, what.channel, what.lanes)
    loops = _split(schedule, what, limits)
    schedule.reorder(*loops.in_order)
    for loop, tag in zip(loops.groups, ("blockIdx.y", "blockIdx.x"), strict=True):
        schedule.bind(loop, tag)
    for loop, tag in zip(loops.threads, ("threadIdx.y", "threadIdx.x"), strict=True):
        schedule.bind(loop, tag)
    tail = accumulate(schedule, rest)
    channels_last(schedule, what.main, what.channel, what.lanes)
    under = loops.threads[-1]
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    vectorise(schedule, tail, under, lanes_of(what.pixels, _IMAGE_VECTOR), limits)
    _hold(schedule, main, what.image, loops.outside[-1], what.vector)
    _hold(schedule, main, what.weights, loops.inside[-1], what.lanes)
    write_out(schedule, loops.written)
    schedule.decompose_reduction(main, loops.outside[0])
    launch_packing(schedule, weights, what.lanes, limits)
    _launch_image(schedule, image, what, limits)
    launch_others(schedule, [p for p in before if p.block is not image], rest, limits, most)
    return True


def _understood(
    schedule: Schedule, main: BlockPart, limits: SketchLimits, most: int
) -> _PackedConvolution | None:
    """The convolution, and how it is cut; None where the function is none, or one without a window."""
    spatial = main.spatial
    reduced = [main.extents[n] for n in main.reducing]
    if len(spatial) < 3 or math.prod(reduced[1:]) == 1 or len(schedule.get(main.block).reads) != 2:
        return None
    last = spatial[-1]
    images = reads_along(schedule, main.block, last)
    if len(images) != 1:
        return None
    image, weights = images[0], 1 - images[0]
    channels = [n for n in spatial[:-1] if reads_along(schedule, main.block, n) == [weights]]
    step = step_along(schedule, main.block, image, last)
    if len(channels) != 1 or step is None:
        return None
    row = main.extents[last]
    vector, pixels = _cut(row, step, limits)
    lanes = lanes_of(main.extents[channels[0]], most)
    while lanes * pixels > limits.accumulators:
        lanes //= 2
    if lanes < 2:
        return None
    channel = channels[0]
    return _PackedConvolution(
        main=main,
        image=image,
        weights=weights,
        batch=[n for n in spatial if n < channel],
        channel=channel,
        rows=[n for n in spatial[:-1] if n > channel],
        last=last,
        lanes=lanes,
        vector=vector,
        pixels=pixels,
    )


def _cut(row: int, step: int, limits: SketchLimits) -> tuple[int, int]:
    """How long the image's vectors are, and how many pixels of a row go together.

    Where these begin must be known within a vector, or the registers that hold them are indexed by what only
    the work-item knows. So they begin with one, or they are the whole row.
    """
    for vector in (_IMAGE_VECTOR, 2):
        pixels = vector // math.gcd(vector, step)
        if pixels > 1 and row % pixels == 0:
            return vector, pixels
    if 2 * row <= limits.accumulators:
        return _IMAGE_VECTOR, row
    return math.gcd(step, 2), 1


def _image(schedule: Schedule, what: _PackedConvolution, before: list[BlockPart]) -> SBlockRV:
    """The block that writes the image, padded or as it is, with its rows cut into vectors."""
    part = maker(schedule, what.main.block, what.image, before)
    made = part.block if part else schedule.cache_read(what.main.block, what.image, "global")
    if what.vector > 1:

        def cut(*at: ir.Var) -> list[ir.Expr]:
            return [*at[:-1], at[-1] // what.vector, at[-1] % what.vector]

        schedule.transform_layout(made, ("write", 0), cut, pad_value=0.0)
    return made


def _split(schedule: Schedule, what: _PackedConvolution, limits: SketchLimits) -> TileLoops:
    """Split the axes and fuse what the grid covers: channels and images along y, pixels along x."""
    loops = list(schedule.get_loops(what.main.block))
    reduced = what.main.reducing
    window = _written_out(what, reduced, limits)
    outside = [loops[n] for n in reduced if n not in window]
    inside = [loops[n] for n in window]
    channels, lanes = schedule.split(loops[what.channel], [None, what.lanes])
    pixels, tile = _rectangle(schedule, what, loops, limits)
    images = [loops[n] for n in what.batch]
    schedule.reorder(*images, channels, *pixels, *outside, *inside, *tile, lanes)
    places, across, _ = sample_tile(schedule, fuse(schedule, pixels), max(limits.threads))
    channels, beside, _ = sample_tile(schedule, channels, max(limits.threads))
    schedule.reorder(*images, channels, places, beside, across)
    groups = [fuse(schedule, [*images, channels]), places]
    return TileLoops(
        groups=groups, threads=[beside, across], outside=outside, inside=inside, tile=tile, lanes=lanes
    )


def _rectangle(
    schedule: Schedule, what: _PackedConvolution, loops: list[LoopRV], limits: SketchLimits
) -> tuple[list[LoopRV], list[LoopRV]]:
    """The loops over rectangles of pixels, and those within one: how large it is, is left open."""
    room = limits.accumulators // (what.lanes * what.pixels)
    outer, inner = [], []
    for n in what.rows:
        rows, tile, _ = sample_tile(schedule, loops[n], min(room, _MOST_ROWS))
        outer.append(rows)
        inner.append(tile)
    pieces, pixels = schedule.split(loops[what.last], [None, what.pixels])
    pieces, tile, _ = sample_tile(schedule, pieces, min(room, max(1, limits.tile // what.pixels)))
    return [*outer, pieces], [*inner, tile, pixels]


def _written_out(what: _PackedConvolution, reduced: list[int], limits: SketchLimits) -> list[int]:
    """The reduction's last axes, as many as may be written out, but never the first."""
    extents, pixels = what.main.extents, max(limits.tile, what.pixels)
    for first in range(1, len(reduced)):
        if math.prod(extents[n] for n in reduced[first:]) * pixels <= _MOST_STEPS:
            return reduced[first:]
    raise ValueError("a window is too large to be written out")


def _hold(schedule: Schedule, main: SBlockRV, read: int, at: LoopRV, lanes: int) -> None:
    """Load the piece of an operand into registers under a loop, its innermost dimension as vectors."""
    copy = schedule.cache_read(main, read, "local")
    schedule.compute_at(copy, at, preserve_unit_loops=True)
    *others, last = below(schedule, copy, at)
    if lanes == 1:
        schedule.unroll(last)
    elif int(schedule.get(last).extent) == lanes:
        schedule.vectorize(last)
    else:
        raise ValueError("only parts of an operand's vectors are read")
    for loop in others:
        schedule.unroll(loop)


def _launch_image(
    schedule: Schedule, block: SBlockRV, what: _PackedConvolution, limits: SketchLimits
) -> None:
    """A launch of its own, in which a work-item computes the same place of several channels."""
    loops = list(schedule.get_loops(block))
    if len(loops) > len(what.rows) + 3:  # batch, channels, rows, columns, and their vectors
        vector = loops.pop()
    else:  # rows that end with a vector are not cut by their layout
        loops[-1], vector = schedule.split(loops[-1], [None, what.vector])
    bind_copied(schedule, loops, len(loops) - len(what.rows) - 2, COPIED, vector, limits)
