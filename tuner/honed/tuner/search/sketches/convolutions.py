"""Schedules convolutions for devices whose compilers load every operand in place, with their tables.

Such compilers load vectors only where they are aligned. `tile_packed` is for those with a window, `pointwise`
for those without one, `tile_windowed` for those of each channel by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from tvm import ir
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.machine.families import DriverClass
from honed.tuner.lower import ROLLED
from honed.tuner.lower.workload import ALIGNED_PIXELS
from honed.tuner.search.packing import PIXELS, channels_last, flatten, launch_packing, pack
from honed.tuner.search.parts import (
    COPIED,
    LINE,
    WARP,
    BlockInfo,
    Keep,
    SketchLimits,
    accumulate,
    below,
    best_group,
    bind,
    bind_copied,
    bind_plane,
    busiest,
    by_single_items,
    contraction,
    fuse,
    keep_in,
    lanes_of,
    last_axis,
    launch_others,
    maker,
    off_usual,
    planes,
    read_along_rows,
    reads_along,
    require,
    require_found,
    sample_tile,
    sketch,
    step_along,
    unroll,
    vectorise,
    write_out,
)
from honed.tuner.search.traces import ScheduleTrace, divisors

# The packed sketch: weights packed by output channels and an image in aligned rows. For devices whose
# compilers load every operand in place, and load vectors only where they are aligned. Two launches precede
# it: one lays the weights out with as many output channels innermost as a vector has lanes, one pads the
# image and cuts its rows into vectors. A work-item then computes a rectangle of pixels for a vector of
# channels: for each input channel it holds the piece of the image under the rectangle in registers, and
# multiplies every vector of weights that it loads with all pixels of the rectangle.

_MOST_STEPS = 200  # Unrolled steps: 5 x 5 of a window for 8 pixels
_MOST_ROWS = 2  # Rows of a work-item's rectangle
_PLANE = 2  # Axes of a window that has rows and columns
_IMAGE_VECTOR = 4  # Most elements of a vector of the image: longer ones end beyond the needed piece


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedConvolution:
    """A convolution to pack: the numbers of axes and of reads, and how rows are cut."""

    main: BlockInfo
    image: int  # The other read is the weights
    batch: list[int]
    channel: int
    rows: list[int]  # The pixels' axes except the last
    lanes: int  # Channels of a vector
    vector: int  # Elements of a vector of the image
    pixels: int  # Pixels along a row that begin and end with a vector, or the whole row


@sketch(20)
def tile_packed(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Tile a convolution, whose operands separate launches lay out."""
    require(by_single_items(limits))
    before, rest = contraction(schedule, Keep.PADDING)
    what = _match_packed(schedule, rest[0], limits, most)
    image = _lay_out_image(schedule, what, before)
    main = what.main.block
    weights = pack(schedule, main, 1 - what.image, what.channel, what.lanes, beside=True)
    under, outside, inside, tile = _split_packed(schedule, what, limits)
    tail = accumulate(schedule, rest)
    channels_last(schedule, what.main, what.channel, what.lanes)
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    vectorise(schedule, tail, under, lanes_of(what.pixels, _IMAGE_VECTOR), limits)
    # A window's rows share no rows of the image where a rectangle has one: then each is loaded when needed,
    # and occupies no registers before. Otherwise Mesa 26.2 spills, and its loads delay each other.
    one_row = 2 * what.lanes * what.pixels > limits.accumulators and len(inside) == _PLANE
    _hold(schedule, main, what.image, inside[0] if one_row else outside[-1], what.vector)
    _hold(schedule, main, 1 - what.image, inside[-1], what.lanes)
    write_out(schedule, [*inside, *tile])
    schedule.decompose_reduction(main, outside[0])
    if limits.loads_ahead:
        schedule.annotate(outside[-1], ROLLED, 1)
    launch_packing(schedule, weights, what.lanes, limits)
    _launch_image(schedule, image, what, limits)
    launch_others(schedule, [p for p in before if p.block is not image], rest, limits, most)


def _match_packed(schedule: Schedule, main: BlockInfo, limits: SketchLimits, most: int) -> _PackedConvolution:
    """Return the convolution, and how it is cut; raise NotApplicable if it is none with a window."""
    *others, last = main.spatial
    image = require_found(read_along_rows(schedule, main))
    require(len(others) > 1 and math.prod(main.extents[n] for n in main.reducing[1:]) > 1)
    channels = [n for n in others if reads_along(schedule, main.block, n) == [1 - image]]
    require(len(channels) == 1)
    (channel,) = channels
    step = require_found(step_along(schedule, main.block, image, last))
    vector, pixels = _cut(main.extents[last], step, limits)
    lanes = lanes_of(main.extents[channel], most)
    while lanes * pixels > limits.accumulators:
        lanes //= 2
    require(lanes > 1)
    return _PackedConvolution(
        main=main,
        image=image,
        batch=[n for n in others if n < channel],
        channel=channel,
        rows=[n for n in others if n > channel],
        lanes=lanes,
        vector=vector,
        pixels=pixels,
    )


def _cut(row: int, step: int, limits: SketchLimits) -> tuple[int, int]:
    """Return the length of the image's vectors, and the pixels of a row in a rectangle.

    The start of these pixels within a vector must be known, or registers are indexed by a number that only
    the work-item knows. So they begin with a vector, or they are the whole row.
    """
    for vector in (_IMAGE_VECTOR, 2):
        pixels = vector // math.gcd(vector, step)
        if pixels > 1 and row % pixels == 0:
            return vector, pixels
    if 2 * row <= limits.accumulators:
        return _IMAGE_VECTOR, row
    return math.gcd(step, 2), 1


def _lay_out_image(schedule: Schedule, what: _PackedConvolution, before: list[BlockInfo]) -> SBlockRV:
    """Return the block that writes the image, padded or as it is, with its rows cut into vectors."""
    part = maker(schedule, what.main.block, what.image, before)
    made = part.block if part else schedule.cache_read(what.main.block, what.image, "global")
    if what.vector > 1:

        def cut(*at: ir.Var) -> list[ir.Expr]:
            return [*at[:-1], at[-1] // what.vector, at[-1] % what.vector]

        schedule.transform_layout(made, ("write", 0), cut, pad_value=0.0)
    return made


def _split_packed(
    schedule: Schedule, what: _PackedConvolution, limits: SketchLimits
) -> tuple[LoopRV, list[LoopRV], list[LoopRV], list[LoopRV]]:
    """Split the axes and bind the loops of the grid: channels and images along y, pixels along x.

    Return the loop that a work-item runs under, those of the sum outside and inside, and those of the tile,
    the lanes last.
    """
    loops = list(schedule.get_loops(what.main.block))
    reduced = what.main.reducing
    window = _axes_to_unroll(what, reduced, limits)
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
    schedule.reorder(*groups, beside, across, *outside, *inside, *tile, lanes)
    bind_plane(schedule, groups, [beside, across])
    return across, outside, inside, [*tile, lanes]


def _rectangle(
    schedule: Schedule, what: _PackedConvolution, loops: list[LoopRV], limits: SketchLimits
) -> tuple[list[LoopRV], list[LoopRV]]:
    """Return the loops over rectangles of pixels, and those within one; sample the rectangle's size."""
    room = limits.accumulators // (what.lanes * what.pixels)
    outer, inner = [], []
    row = loops[what.main.spatial[-1]]
    for each in [loops[n] for n in what.rows] or [schedule.add_unit_loop(row)]:
        rows, tile, _ = sample_tile(schedule, each, min(room, _MOST_ROWS))
        outer.append(rows)
        inner.append(tile)
    pieces, pixels = schedule.split(row, [None, what.pixels])
    pieces, tile, _ = sample_tile(schedule, pieces, min(room, max(1, limits.tile // what.pixels)))
    return [*outer, pieces], [*inner, tile, pixels]


def _axes_to_unroll(what: _PackedConvolution, reduced: list[int], limits: SketchLimits) -> list[int]:
    """Return the reduction's last axes, as many as may be unrolled, but never the first.

    Raises ValueError where a window is too large to be unrolled.
    """
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
    unroll(schedule, others)


def _launch_image(
    schedule: Schedule, block: SBlockRV, what: _PackedConvolution, limits: SketchLimits
) -> None:
    """Launch the image's block separately; a work-item computes one place of several channels."""
    loops = list(schedule.get_loops(block))
    if len(loops) > len(what.rows) + 3:  # Batch, channels, rows, columns, and their vectors
        vector = loops.pop()
    else:  # The layout does not cut rows that end with a vector
        loops[-1], vector = schedule.split(loops[-1], [None, what.vector])
    bind_copied(schedule, loops, len(loops) - len(what.rows) - 2, COPIED, vector, limits)


# The best tile depends on the window and on the sum, which the sketch does not show: they are assumed as in
# most convolutions.

_LAYOUTS = 2  # Least number of transformed layouts, of weights and of results
_PACKED_TILES = 4  # Rows and pieces of a rectangle, then work-items along places and channels
_SUMMED, _WINDOW = 64, 3  # Input channels, and rows and columns of a window
_HALF = 2  # Bytes
# Registers of a work-item, and the cost in lines of each beyond that for an input channel
_REGISTERS, _SPILLED = 64, 4
_SUMS, _ITEMS = 48, 256  # Most sums of a work-item and work-items of a group, as the family's rules say
_FMA = 4  # Multiply-adds of a work-item in a clock
_PAIRED = {DriverClass.MESA_26: 2}  # Halves that share a register and are multiplied at once, in loops, too


def packed_tile(sketch: ScheduleTrace, driver: DriverClass) -> ScheduleTrace | None:
    """Return the sketch `tile_packed` with its best rectangle and groups on Malis; None for another kind."""
    if not _is_packed(sketch):
        return None
    (at_rows, rows), (at_pieces, pieces), (at_places, across), (at_channels, down) = sketch.tiles
    _, pixels, *_ = sketch.splits
    made = []
    for tall, long in product(divisors(rows.extent, rows.most), divisors(pieces.extent, pieces.most)):
        if tall * long * pixels * sketch.lanes > _SUMS:
            continue
        places = rows.extent // tall * (pieces.extent // long)
        for high, wide in planes(down.extent, places, _ITEMS, down.extent * places):
            cuts = {at_rows: rows.cut(tall), at_pieces: pieces.cut(long)}
            cuts |= {at_places: across.cut(wide, places), at_channels: down.cut(high)}
            made.append(sketch.with_most(cuts))
    return min(made, key=lambda one: packed_clocks(one, driver), default=None)


def packed_clocks(start: ScheduleTrace, driver: DriverClass = DriverClass.ARM) -> float:
    """Return the clocks of the busiest core for an input channel with a tile of `packed_tile`, else 0.

    A warp loads the piece of the image and the vectors of weights, a clock for each line, and in the end it
    stores the pixels of each channel. The root of the squares of its loads' and its multiply-adds' clocks is
    between the bounds of the bench, where one hides the other or both add up.
    """
    if not _is_packed(start):
        return 0.0
    lanes, pixels, *_ = start.splits
    (_, tall), (beside, long), (_, wide), (_, high) = (tile.factors for _, tile in start.tiles)
    long, group = long * pixels, high * wide
    items = math.prod(tile.extent for _, tile in start.tiles[2:])
    loads = (tall + _WINDOW - 1) * math.ceil((long + _WINDOW - 1) / _IMAGE_VECTOR)
    stores = lanes * tall * math.ceil(long / _IMAGE_VECTOR) / _SUMMED
    row = beside * long
    padded = math.ceil((row + _WINDOW - 1) / _IMAGE_VECTOR) * _IMAGE_VECTOR
    warps = [range(n, min(n + WARP, group)) for n in range(0, group, WARP)]
    lines = 0.0
    for warp in warps:
        places = [(n // wide, n % wide // beside * tall, n % wide % beside * long) for n in warp]
        image = {(y * padded + x) * _HALF // LINE for _, y, x in places}
        weights = {c * lanes * _HALF // LINE for c, *_ in places}
        results = {(c, (y * row + x) * _HALF // LINE) for c, y, x in places}
        lines += loads * len(image) + _WINDOW**2 * len(weights) + stores * len(results)
    sums, paired = tall * long * lanes, _PAIRED.get(driver, 1)
    spilled = max(0.0, (sums + loads * _IMAGE_VECTOR + lanes) / paired - _REGISTERS)
    clocks = math.hypot(lines / len(warps) + _SPILLED * spilled, _WINDOW**2 * sums / (_FMA * paired))
    return busiest(group, items) * clocks


def _is_packed(sketch: ScheduleTrace) -> bool:
    names = sketch.names
    flat = "TransformBlockLayout" in names  # A product of one row may have as many tiles
    packs = sketch.by_groups and names.count("TransformLayout") >= _LAYOUTS and not flat
    return packs and len(sketch.tiles) == _PACKED_TILES and sketch.tiles[0][1].most <= _MOST_ROWS


# The pointwise sketch: a few pixels of a flat image for a vector of output channels. For convolutions without
# a window over images that no vector divides, on devices whose compilers load vectors only where they are
# aligned. So vectors are of output channels: a separate launch lays the weights out in them, and pixels are
# loaded one by one. The last work-item along the image reads zeros in place of missing pixels, and does not
# write them.

_CHANNELS = 1  # The axis of output channels
_VECTOR = 16  # Bytes
# Accumulators of a work-item: sums that are added up twice do not spill, and all cores have warps
_ACCUMULATORS = 16


@sketch(30)
def pointwise(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Tile a convolution over flat pixels: channels and images along y, pixels along x."""
    require(by_single_items(limits))
    rest = flatten(schedule, *contraction(schedule, Keep.PADDING)) or []
    require(bool(rest) and rest[0].extents[PIXELS] % ALIGNED_PIXELS != 0)
    main, extents = rest[0].block, rest[0].extents
    lanes = lanes_of(extents[_CHANNELS], most)
    require(lanes > 1)
    (image,) = reads_along(schedule, main, PIXELS)
    pixels = max(1, _ACCUMULATORS // lanes)
    tail = accumulate(schedule, rest)
    held = _pad(schedule, main, image, pixels)
    (image,) = reads_along(schedule, main, PIXELS)
    weights = pack(schedule, main, 1 - image, _CHANNELS, lanes, beside=True)
    channels_last(schedule, rest[0], _CHANNELS, lanes)
    images, channels, places, summed = schedule.get_loops(main)
    channels, vector = schedule.split(channels, [None, lanes])
    channels, down, _ = sample_tile(schedule, channels, max(limits.threads))
    places, tile = schedule.split(places, [None, pixels])
    places, under, _ = sample_tile(schedule, places, max(limits.threads))
    outside, steps, _ = sample_tile(schedule, summed, limits.unroll)
    schedule.reorder(images, channels, places, down, under, outside, steps, tile, vector)
    bind_plane(schedule, [fuse(schedule, [images, channels]), places], [down, under])
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    schedule.compute_at(held, steps, preserve_unit_loops=True)
    vectors = schedule.cache_read(main, 1 - image, "local")
    schedule.compute_at(vectors, steps, preserve_unit_loops=True)
    *others, loaded = below(schedule, vectors, steps)
    unroll(schedule, [*below(schedule, tail, under), *below(schedule, held, steps), *others, steps, tile])
    for loop in (loaded, vector):
        schedule.vectorize(loop)
    schedule.decompose_reduction(main, outside)
    launch_packing(schedule, weights, lanes, limits)


def _pad(schedule: Schedule, main: SBlockRV, image: int, pixels: int) -> SBlockRV:
    """Pad the image to whole tiles; return the block that holds it in registers, with zeros at the end.

    The results of the zeros are not copied to the output.
    """
    schedule.pad_einsum(main, [1, 1, pixels, 1])
    padded = schedule.get_producers(main)
    if not padded:  # The image is a multiple of the tile already
        return schedule.cache_read(main, image, "local")
    (cropped,) = schedule.get_consumers(main)
    schedule.compute_inline(cropped)
    schedule.set_scope(padded[0], 0, "local")
    return padded[0]


def point_groups(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch `pointwise` with its best groups on Malis; None where it is of another kind.

    The sketch determines a work-item's tile. Its groups are open, and should give all cores an equal share of
    few lines of memory; so are the unrolled steps of the sum, as many as possible.
    """
    if "PadEinsum" not in sketch.names or len(sketch.tiles) != 3:
        return None
    down, across, steps = (tile for _, tile in sketch.tiles)
    items = down.extent * across.extent
    groups = list(planes(down.extent, across.extent, across.most, items))
    if not groups:
        return None

    def rank(plane: tuple[int, int]) -> tuple[float, ...]:
        """Return the lines that the busiest core touches, then the distance from the usual group."""
        group = math.prod(plane)
        lines = _lines(*plane, sketch.lanes, steps.extent)
        return busiest(group, items) * lines, off_usual(group), -plane[1]

    high, wide = min(groups, key=rank)
    return sketch.with_most(sketch.cut([high, wide, divisors(steps.extent, steps.most)[-1]]))


def _lines(high: int, wide: int, lanes: int, terms: int) -> float:
    """Return the lines of memory that a warp of such a group touches, on average.

    In each term of the sum it loads the pixels one by one, and a vector of weights. In the end it stores the
    pixels of each channel.
    """
    pixels, size = max(1, _ACCUMULATORS // lanes), _VECTOR // lanes
    per_line = max(1, LINE // (pixels * size)), LINE // _VECTOR  # Places, and vectors of channels
    warps = [range(n, min(n + WARP, high * wide)) for n in range(0, high * wide, WARP)]
    touched = 0
    for warp in warps:
        places = {(n // wide, n % wide // per_line[0]) for n in warp}
        loaded = pixels * len({place for _, place in places}) + len({n // wide // per_line[1] for n in warp})
        touched += terms * loaded + pixels * lanes * len(places)
    return touched / len(warps)


# The windowed sketch: a work-item holds the piece of an image that a window moves over. For convolutions of
# each channel by itself on devices whose compilers load every operand in place. Neighbouring pixels read
# nearly equal elements: each is loaded once, the zeros around the image are selected once, and all steps of
# the window read registers.

_MOST_WINDOW = 25  # Steps: 5 x 5
_WINDOWED_PIXELS = 16  # Pixels of a work-item; fewer where the window moves by several, over a larger piece
_ROWS = 4  # Rows of the pixels
_SHORT = 4  # Lanes of the shortest vectors with a rectangle in a table


@sketch(40)
def tile_windowed(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Tile the image of a convolution without a sum over channels."""
    require(by_single_items(limits))
    before, rest = contraction(schedule, Keep.PADDING)
    main, spatial = rest[0], rest[0].spatial
    require(len(spatial) >= 3 and 1 < main.reduced <= _MOST_WINDOW)
    images = reads_along(schedule, main.block, spatial[-1])  # The window moves over it
    require(len(images) == 1 and last_axis(schedule, main.block, images[0]) is None)
    require(any(len(reads_along(schedule, main.block, n)) == 2 for n in spatial[:-2]))
    (image,) = images
    loops = schedule.get_loops(main.block)
    window = [loops[n] for n in main.reducing]
    step = step_along(schedule, main.block, image, spatial[-1])
    room = min(_WINDOWED_PIXELS // step, _MOST_STEPS // main.reduced) if step else 0
    require(room > 0)
    lanes = lanes_of(main.extents[spatial[-1]], min(most, room))
    outer = [loops[n] for n in spatial]
    pieces, vector = schedule.split(outer[-1], [None, lanes])
    outer[-1], pixels, _ = sample_tile(schedule, pieces, room // lanes)
    outer[-2], rows, _ = sample_tile(schedule, outer[-2], _ROWS)
    schedule.reorder(*outer, *window, rows, pixels, vector)
    under = bind(schedule, outer, limits)
    tail = accumulate(schedule, rest)
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    vectorise(schedule, tail, under, lanes, limits)
    padded = maker(schedule, main.block, image, before)
    held = padded.block if padded else schedule.cache_read(main.block, image, "local")
    if padded:
        keep_in(schedule, held, "local")
    schedule.compute_at(held, under, preserve_unit_loops=True)
    unroll(schedule, [*below(schedule, held, under), *window, rows, pixels, vector])
    schedule.decompose_reduction(main.block, window[0])
    launch_others(schedule, [p for p in before if p is not padded], rest, limits, most)


_BORDER = 2  # Border of a window of 3 x 3


def window_tile(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch `tile_windowed` with its best rectangle on Malis; None where it is of another kind.

    None, too, where one vector is a rectangle: that of shorter vectors is squarer, and does not spill.

    A work-item loads the piece of the image under its pixels and a border: the larger and squarer the
    rectangle, the less border. docs/dev/measurements.md compares these rectangles with drawn ones.
    """
    if not _is_windowed(sketch):
        return None
    (_, pixels), (_, rows), (at_threads, threads) = sketch.tiles
    lanes = sketch.lanes
    if pixels.most == 1 and lanes > _SHORT:
        return None
    fitting = (
        (long, tall)
        for long, tall in product(divisors(pixels.extent), divisors(rows.extent, _ROWS))
        if long * tall <= pixels.most
    )

    cut = min(fitting, key=lambda cut: (_loads_per_pixel(cut[0] * lanes, cut[1]), -cut[0]))
    items = threads.extent * pixels.factors[1] * rows.factors[1] // math.prod(cut)
    group = threads.cut(best_group(items, threads.most), items)
    return sketch.with_most({**sketch.cut(cut), at_threads: group})


def window_loads(start: ScheduleTrace) -> float:
    """Return the elements loaded for each pixel with a rectangle of `window_tile`, else 0."""
    if not _is_windowed(start):
        return 0.0
    (_, pixels), (_, rows), _ = start.tiles
    return _loads_per_pixel(pixels.factors[-1] * start.lanes, rows.factors[-1])


def _is_windowed(sketch: ScheduleTrace) -> bool:
    rows = sketch.by_groups and "ComputeAt" in sketch.names and len(sketch.tiles) == 3
    return rows and sketch.tiles[1][1].most == _ROWS


def _loads_per_pixel(long: int, tall: int) -> float:
    """Return the elements of the image loaded for each pixel of a rectangle."""
    return (long + _BORDER) * (tall + _BORDER) / (long * tall)
