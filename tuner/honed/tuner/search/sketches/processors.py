"""Provides sketches for processors that lay operands out first: convolutions by channels, products by panels.

Their table is beside them; it is that of the sketch `tile` on processors, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.tuner.search.packing import channels_last, launch_rows, pack
from honed.tuner.search.parts import (
    BlockInfo,
    Keep,
    SketchLimits,
    alone,
    below,
    contraction,
    fuse,
    is_constant,
    is_elementwise,
    keep_in,
    lanes_of,
    launch_others,
    maker,
    read_along_rows,
    reads_along,
    require,
    require_found,
    sample_tile,
    sketch,
    unroll,
    vectorise,
    write_out,
)
from honed.tuner.search.traces import ScheduleTrace, divisors

# The channels sketch: convolutions with their output channels along the lanes. For processors. Separate
# launches lay the weights out with as many output channels innermost as a vector has lanes, and pad the
# image. A work-item then computes a rectangle of pixels for a few vectors of channels. Each vector of weights
# is loaded once for all pixels of the rectangle, which the processor broadcasts from memory as it multiplies;
# of a depthwise convolution the image is laid out like the weights, so its pixels are vectors, too. The
# elementwise tail runs in the same lanes, before they are separated to be written row by row. So neither odd
# extents nor strides cost anything. Where there is no window, and vectors divide the rows, `tile` needs
# neither step.

_BYTES = 4  # Bytes of an element; processors compute halves in singles
_MOST_VECTORS = 28  # Vectors of accumulators: of 32 registers, the others hold weights and pixels
_LEAST_REDUCED = 2  # Axes: a window's, be it of one pixel, and channels; products have one
_MOST_BESIDE = 2  # Vectors of channels that share the pixels
_WRITTEN = 16  # Unrolled elements of a window's row at most: filters of sounds have hundreds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """A convolution, by the numbers of its reads and axes."""

    main: BlockInfo
    image: int
    weights: int
    depthwise: bool
    channel: int
    pixels: list[int]
    lanes: int


@sketch(60)
def channels(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Tile a convolution with its channels along the lanes."""
    require(limits.groups_of_one)
    before, rest = contraction(schedule, Keep.PADDING)
    what = _convolution(schedule, rest[0], limits, most)
    main = what.main.block
    laid_out = [pack(schedule, main, what.weights, what.channel, what.lanes)]
    if what.depthwise:
        image = maker(schedule, main, what.image, before)
        made = image.block if image else None
        laid_out.append(pack(schedule, main, what.image, what.channel, what.lanes, made))
    groups, outside, written = _rectangle_loops(schedule, what)
    schedule.reorder(*groups, *outside, *written)
    group = fuse(schedule, groups)
    schedule.bind(group, "blockIdx.x")
    _write_in_lanes(schedule, what, rest, group)
    write_out(schedule, written)
    schedule.decompose_reduction(main, outside[0])
    for block in laid_out:
        launch_rows(schedule, block, what.lanes)
    launch_others(schedule, [p for p in before if p.block not in laid_out], rest, limits, most)


def _convolution(schedule: Schedule, main: BlockInfo, limits: SketchLimits, most: int) -> _Convolution:
    """Return the convolution that a function computes.

    Raises NotApplicable where it computes none, where its channels fill no vector, or where `tile` is better.
    """
    spatial = main.spatial
    require(len(spatial) >= 3)
    image = require_found(read_along_rows(schedule, main))
    weights = 1 - image
    read = {n: reads_along(schedule, main.block, n) for n in spatial[:-1]}
    channel = require_found(next((n for n, reads in read.items() if weights in reads), None))
    lanes = lanes_of(main.extents[channel], most)
    depthwise = len(read[channel]) == 2
    reduced = [main.extents[n] for n in main.reducing]
    require(len(reduced) >= _LEAST_REDUCED and lanes > 1)
    windows = depthwise or math.prod(reduced[1:]) > 1
    require(windows or main.extents[spatial[-1]] % (limits.vector_bytes // _BYTES) != 0)
    return _Convolution(
        main=main,
        image=image,
        weights=weights,
        depthwise=depthwise,
        channel=channel,
        pixels=[n for n in spatial if n > channel],
        lanes=lanes,
    )


def _rectangle_loops(
    schedule: Schedule, what: _Convolution
) -> tuple[list[LoopRV], list[LoopRV], list[LoopRV]]:
    """Split the axes; sample the size of the rectangle.

    Return the loops of groups, those of the sum, and the unrolled ones with the lanes last.
    """
    loops = list(schedule.get_loops(what.main.block))
    vectors, lanes = schedule.split(loops[what.channel], [None, what.lanes])
    vectors, beside, _ = sample_tile(schedule, vectors, _MOST_BESIDE)
    outer, tile = list[LoopRV](), list[LoopRV]()
    for n in what.pixels:
        places, steps, _ = sample_tile(schedule, loops[n], _MOST_VECTORS)
        outer.append(places)
        tile.append(steps)
    *outside, row = (loops[n] for n in what.main.reducing)
    if (extent := int(schedule.get(row).extent)) > _WRITTEN:
        turns, row = schedule.split(row, [None, max(divisors(extent, _WRITTEN))])
        outside.append(turns)
    groups = [*loops[: what.channel], *outer[:-1], vectors, outer[-1]]
    return groups, outside, [row, beside, *tile, lanes]


def _write_in_lanes(schedule: Schedule, what: _Convolution, rest: list[BlockInfo], under: LoopRV) -> None:
    """Run the tail in lanes, if there is one, then separate them."""
    main = what.main
    tail = rest[1] if len(rest) == 2 and is_elementwise(rest[1], main) else None
    if tail is None:
        result = schedule.cache_write(main.block, 0, "local")
        channels_last(schedule, main, what.channel, what.lanes)
    else:
        keep_in(schedule, main.block, "local")
        result = schedule.cache_write(tail.block, 0, "local")
        for part in (main, tail):
            channels_last(schedule, part, what.channel, what.lanes)
        schedule.reverse_compute_at(tail.block, under, preserve_unit_loops=True)
        _in_lanes(schedule, tail.block, under, what)
    schedule.reverse_compute_at(result, under, preserve_unit_loops=True)
    unroll(schedule, below(schedule, result, under))


def _in_lanes(schedule: Schedule, tail: SBlockRV, under: LoopRV, what: _Convolution) -> None:
    """Run the tail with the channels of a vector innermost."""
    loops = below(schedule, tail, under)
    channel = loops[len(loops) - 1 - len(what.pixels)]
    vectors, lanes = schedule.split(channel, [None, what.lanes])
    others = [loop if loop is not channel else vectors for loop in loops]
    schedule.reorder(*others, lanes)
    write_out(schedule, [*others, lanes])


# The panels sketch: products of any number of rows and columns. The operand along the lanes is laid out in
# panels, one vector of columns wide, in a separate launch: only once if it is constant. A work-item then
# reads it from end to end, where rows of a power of two would fall on the same few lines of the cache. Rows
# and columns that no tile divides are rounded up (a sequence of 191 has neither tiles nor vectors): columns
# and rows beyond the last are zeros, and their results are dropped.

_READ_AS_THEY_LIE = 8  # Multiples of this number of columns get no panels, except for constants
_FEW_ROWS = 8  # Rows, up to which laying operands out takes longer than the product
_ROWS = 4  # Multiple that rows are rounded up to, where no tile of at least this size divides them
_MOST_TILE_ROWS = 16  # Rows of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class _PanelProduct:
    """A product by the numbers of its axes and reads."""

    main: SBlockRV
    rows: int | None  # Number of the axis of rows, None for a product of a vector
    columns: int
    reduced: int
    laned: int  # Number of the operand along the columns
    lanes: int
    multiples: list[int]  # Multiple that each axis is rounded up to

    @property
    def rounded(self) -> bool:
        """Return whether any axis is rounded up."""
        return max(self.multiples) > 1


@sketch(70)
def panels(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Tile a product by panels."""
    require(limits.groups_of_one)
    before, (main, *tails) = contraction(schedule, Keep.DEAR)
    require(not before)
    what = _panel_product(schedule, main, most)
    together = bool(tails) and is_elementwise(tails[0], main)
    copy = _copy_operand(schedule, what)
    result = _product_result(schedule, what, tails[0].block if together else None)
    pack(schedule, what.main, what.laned, what.columns, what.lanes, copy)
    _tile_product(schedule, what, result, limits)
    launch_rows(schedule, copy, what.lanes)
    if tails and not together:
        alone(schedule, tails[0], limits, most)


def _panel_product(schedule: Schedule, main: BlockInfo, most: int) -> _PanelProduct:
    """Return the product that a function computes; raise NotApplicable where it has nothing to lay out."""
    spatial, reduced = main.spatial, main.reducing
    laned = require_found(read_along_rows(schedule, main))
    require(len(reduced) == 1)
    extents, columns = main.extents, spatial[-1]
    rows = next((n for n in reversed(spatial[:-1]) if extents[n] > 1), None)
    multiples = [1] * len(extents)
    if extents[columns] % most:
        multiples[columns] = most
    if rows is not None and not any(extents[rows] % n == 0 for n in range(_ROWS, _MOST_TILE_ROWS + 1)):
        multiples[rows] = _ROWS
    odd_rows = rows is not None and multiples[rows] > 1 and extents[rows] > _FEW_ROWS
    operand = schedule.get(main.block).reads[laned].source
    odd = extents[columns] % _READ_AS_THEY_LIE != 0 or odd_rows
    require(extents[columns] >= most and (odd or is_constant(schedule, operand)))
    return _PanelProduct(
        main=main.block,
        rows=rows,
        columns=columns,
        reduced=reduced[0],
        laned=laned,
        lanes=most,
        multiples=multiples,
    )


def _copy_operand(schedule: Schedule, what: _PanelProduct) -> SBlockRV:
    """Return the block that copies the operand along the columns, rounded up where its axes are.

    The other operand is read where it lies, with zeros selected beyond its end. Both are first indexed by the
    axes alone: TVM rounds up nothing else.
    """
    copies = [schedule.reindex(what.main, ("read", n)) for n in range(2)]
    copy, other = copies[what.laned], copies[1 - what.laned]
    if what.rounded:
        schedule.pad_einsum(what.main, what.multiples)
        along = schedule.get(what.main).reads[what.laned].source
        if not schedule.get(copy).writes[0].source.same_as(along):
            schedule.compute_inline(copy)
        for block in schedule.get_producers(what.main):
            if schedule.get(block).writes[0].source.same_as(along):
                copy = block
            elif not schedule.get(block).same_as(schedule.get(other)):
                schedule.compute_inline(block)
    schedule.compute_inline(other)
    return copy


def _product_result(schedule: Schedule, what: _PanelProduct, tail: SBlockRV | None) -> SBlockRV:
    """Return the block that writes a tile's sums from registers: the tail, or a copy."""
    if what.rounded:
        (crop,) = schedule.get_consumers(what.main)
        if tail is not None:
            schedule.compute_inline(crop)
        result = tail or crop
    elif tail is None:
        return schedule.cache_write(what.main, 0, "local")
    else:
        result = tail
    keep_in(schedule, what.main, "local")
    return result


def _tile_product(schedule: Schedule, what: _PanelProduct, result: SBlockRV, limits: SketchLimits) -> None:
    """Give each work-item a tile of rows and vectors, whatever its size."""
    loops = list(schedule.get_loops(what.main))
    outer = [loop for n, loop in enumerate(loops) if n not in (what.rows, what.columns, what.reduced)]
    columns, lanes = schedule.split(loops[what.columns], [None, what.lanes])
    groups, vectors, _ = sample_tile(schedule, columns, limits.vectors)
    outer.append(groups)  # Consecutive work-items read the same panels
    tile = [vectors]
    if what.rows is not None:
        groups, rows, _ = sample_tile(schedule, loops[what.rows], _MOST_TILE_ROWS)
        outer.append(groups)
        tile.insert(0, rows)
    terms, written, _ = sample_tile(schedule, loops[what.reduced], limits.unroll)
    schedule.reorder(*outer, terms, written, *tile, lanes)
    under = fuse(schedule, outer)
    schedule.bind(under, "blockIdx.x")
    schedule.reverse_compute_at(result, under, preserve_unit_loops=True)
    if what.multiples[what.columns] == 1:
        vectorise(schedule, result, under, what.lanes, limits)
    unroll(schedule, [written, *tile])
    schedule.vectorize(lanes)
    schedule.decompose_reduction(what.main, terms)


# A work-item of a convolution or a product computes a number of vectors of accumulators: each pixel is one in
# the sketch `channels`, each piece of a row in `tile` and `panels`. Good tiles have as many as registers
# hold, and need few loads. docs/dev/measurements.md compares them with draws.

_MOST = 16  # Vectors of pixels: with more, compilers keep some in memory
_LONG = 8  # Pixels of a row, from which on the lanes are separated by whole vectors
_SHORT = 0.9  # Worth of shorter rows, as a factor
_FEW = 7  # Vectors: fewer leave the processor waiting for its own sums
_MOST_PIECES = 24  # Vectors of pieces of rows
_LANES = 8  # Lanes of vectors of AVX2, which has 16 registers of them; AVX-512 and NEON have 32
_MOST_PANELS = {False: 16, True: 12}  # Vectors of a product, by whether registers are that few
_MOST_ROWS = 6  # Rows of a product: each is broadcast on its own


def rectangle(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch with the best rectangle to cut its image into; None where it is of another kind."""
    if sketch.by_groups or sketch.names.count("DecomposeReduction") > 1:
        return None
    laid_out = sketch.names.count("TransformLayout")
    extents = [tile.extent for _, tile in sketch.tiles]
    if laid_out >= 2:
        return _of_channels(sketch, extents)
    if laid_out == 1 and "ReIndex" in sketch.names:  # `tile_across` lays its accumulators out
        return _of_panels(sketch, extents)
    if laid_out == 0 and len(extents) == 4 and extents[-1] == 1:  # Channels, rows, columns; no window
        return _of_pieces(sketch)
    return None


def _of_channels(sketch: ScheduleTrace, extents: Sequence[int]) -> ScheduleTrace:
    beside, *pixels = extents
    fitting = (steps for steps in product(*map(divisors, pixels)) if math.prod(steps) <= _MOST)
    steps = max(fitting, key=lambda steps: (_worth(steps), steps[-1]))
    vectors = 2 if math.prod(steps) <= _FEW and beside % 2 == 0 else 1
    return sketch.with_most(sketch.cut([vectors, *steps]))


def _worth(steps: Sequence[int]) -> float:
    """Return a score by the sums per vector loaded: weights are loaded once, pixels as many as there are."""
    count = math.prod(steps)
    return count / (count + 2) * (1.0 if steps[-1] >= _LONG else _SHORT)


def _of_pieces(sketch: ScheduleTrace) -> ScheduleTrace:
    """Choose about as many channels as pieces: all pieces share a weight, all channels share a piece."""
    allowed = [divisors(tile.extent, tile.most) for _, tile in sketch.tiles]
    fitting = (steps for steps in product(*allowed) if math.prod(steps) <= _MOST_PIECES)
    steps = max(fitting, key=lambda s: (math.prod(s) / (s[0] + s[1] * s[2]), s[2]))
    return sketch.with_most(sketch.cut(steps))


def _of_panels(sketch: ScheduleTrace, extents: Sequence[int]) -> ScheduleTrace:
    """Choose about as many rows as vectors: each vector is loaded for all rows, each row for all vectors."""
    panels, *rows, terms = extents
    most = _MOST_PANELS[sketch.lanes == _LANES]
    allowed = [divisors(panels, sketch.tiles[0][1].most), *(divisors(extent, _MOST_ROWS) for extent in rows)]
    fitting = (steps for steps in product(*allowed) if math.prod(steps) <= most)
    steps = max(fitting, key=lambda s: (math.prod(s) / sum(s), s[0]))
    written = next(n for n in (4, 2, 1) if terms % n == 0)
    return sketch.with_most(sketch.cut([*steps, written]))
