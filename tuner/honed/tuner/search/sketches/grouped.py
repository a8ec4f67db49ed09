"""Provides the grouped and the sliced sketch: work-items of a group share a tile, or its sums as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from honed.tuner.search.parts import (
    CHOICES,
    REDUCE,
    BlockInfo,
    Keep,
    SketchLimits,
    accumulate,
    alone,
    calls,
    contraction,
    fuse,
    is_dear,
    is_elementwise,
    lanes_of,
    launch_others,
    require,
    sample_any,
    sample_tile,
    store_partial,
    unroll_some,
    vectorise,
    write_out,
)
from honed.tuner.search.traces import Decision, ScheduleTrace, Tile, divisors

# The grouped sketch: the work-items of a group compute a tile of a contraction together. Each axis of the
# output is split into groups, virtual threads, threads and registers, each level with a bound of its own, so
# that most draws fit the device; operands are copied through local memory where that pays.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTile:
    """The limits of the grouped sketch."""

    shared: bool  # Copy the operands of a group's tile through local memory
    copied: tuple[int, ...]  # Elements of one load of such a copy, to choose from
    registers: int  # Elements of a work-item's tile, along one axis
    threads: int  # Work-items of a group, along one axis
    virtual: int  # Tiles of a work-item, strided by the group's tile, along one axis; 1: none
    reduced: int  # Elements of the outer reduction that are processed at once
    sliced: int  # Most outputs of a contraction whose sums the work-items of a group share
    unroll: tuple[int, ...]  # Unrolled steps to choose from


@dataclass(slots=True)
class _Levels:
    """The loops of the output's axes, outermost level first."""

    groups: list[LoopRV]
    virtual: list[LoopRV]
    threads: list[LoopRV]
    registers: list[LoopRV]


def tile_grouped(
    schedule: Schedule, by: GroupTile, limits: SketchLimits, most: int, *, ahead: bool = False
) -> None:
    """Tile a contraction over groups.

    With `ahead` a group loads its next operands into registers while it multiplies those in local memory.
    """
    before, rest = contraction(schedule, Keep.PADDING if by.shared else Keep.DEAR)
    main = rest[0]
    loops = schedule.get_loops(main.block)
    spatial = [(loops[n], main.extents[n]) for n in main.spatial]
    reduce = [loops[n] for n in main.reducing]
    levels = _split(schedule, spatial, by, most)
    outer, inner, _ = sample_tile(schedule, reduce[0], _steps_at_once(main, by))
    schedule.reorder(
        *levels.groups, *levels.virtual, *levels.threads, outer, inner, *reduce[1:], *levels.registers
    )
    schedule.bind(fuse(schedule, levels.groups), "blockIdx.x")
    if levels.virtual:
        schedule.bind(fuse(schedule, levels.virtual), "vthread.x")
    thread = fuse(schedule, levels.threads)
    schedule.bind(thread, "threadIdx.x")
    schedule.reverse_compute_at(accumulate(schedule, rest), thread, preserve_unit_loops=True)
    if by.shared:
        copy_operands(schedule, main.block, outer, by, ahead=ahead)
    prepare(schedule, before, limits, most, inlined=by.shared)
    launch_others(schedule, [], rest, limits, most)
    write_out(schedule, levels.registers)
    unroll_some(schedule, inner, by.unroll)
    schedule.decompose_reduction(main.block, outer)


def _steps_at_once(contracted: BlockInfo, by: GroupTile) -> int:
    """Return the most steps of the outer reduction that are processed at once.

    They are few where each step is a window, because windows share their elements.
    """
    window = math.prod(contracted.extents[n] for n in contracted.reducing[1:])
    return by.reduced if window == 1 or not by.shared else max(1, 2 * by.reduced // window)


def _split(schedule: Schedule, spatial: list[tuple[LoopRV, int]], by: GroupTile, most: int) -> _Levels:
    levels = _Levels([], [], [], [])
    for number, (loop, extent) in enumerate(spatial):
        last = number == len(spatial) - 1
        if extent == 1 and not last:
            levels.groups.append(loop)
            continue
        lanes = lanes_of(extent, most) if last else 1
        if last:
            loop, vector = schedule.split(loop, [None, lanes])
        loop, registers, _ = sample_tile(schedule, loop, max(1, by.registers // lanes))
        loop, threads, _ = sample_tile(schedule, loop, by.threads)
        if by.virtual > 1:
            loop, virtual, _ = sample_tile(schedule, loop, by.virtual)
            levels.virtual.append(virtual)
        levels.groups.append(loop)
        levels.threads.append(threads)
        levels.registers.append(registers)
    levels.registers.append(vector)
    return levels


def copy_operands(schedule: Schedule, main: SBlockRV, at: LoopRV, by: GroupTile, *, ahead: bool) -> None:
    """Have the group copy its tile's operands into local memory, in vectors of an open length."""
    reads = schedule.get(main).reads
    for number, read in enumerate(reads):
        copy = schedule.cache_read(main, number, "shared")
        schedule.compute_at(copy, at, preserve_unit_loops=True)
        axes = len(read.source.shape)
        fuse(schedule, schedule.get_loops(copy)[-axes:])
        chosen = any(calls(schedule, b, CHOICES) for b in schedule.get_producers(copy))
        copied = (1,) if chosen else by.copied  # A vector whose lanes choose differently cannot be generated
        schedule.annotate(copy, "meta_schedule.cooperative_fetch", sample_any(schedule, copied))
        if ahead:
            schedule.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    if ahead:
        _pipeline(schedule, at, len(reads))


def _pipeline(schedule: Schedule, loop: LoopRV, copies: int) -> None:
    """Run the steps of a loop in the order: load into registers, multiply, store into local memory.

    The loop's statements are a load and a store for each copy, and the multiplication, which is a step late.
    """
    loads, stores = range(copies), range(copies + 1, 2 * copies + 1)
    order = [place for pair in zip(loads, stores, strict=True) for place in pair]
    schedule.annotate(loop, "software_pipeline_stage", [0] * (2 * copies) + [1])
    schedule.annotate(loop, "software_pipeline_order", [*order, copies])


def prepare(
    schedule: Schedule, before: list[BlockInfo], limits: SketchLimits, most: int, *, inlined: bool
) -> None:
    """Schedule the blocks that make operands: beside the copies, or if expensive in an earlier launch."""
    for part in reversed(before):
        if inlined and not is_dear(schedule, part.block):
            schedule.compute_inline(part.block)
            continue
        alone(schedule, part, limits, most)


# The sliced sketch: work-items of a group share a contraction's sums as well as its tile. For products with
# few outputs and long sums, whose tiles alone keep few work-items busy. Every slice of a group adds up its
# own steps of the reduction, for the whole tile; the slices' sums are stored in local memory, where all
# work-items together add them up and write the tile.

SLICES = (4, 8)  # Slices of a group, to choose from
_LEAST_STEPS = 8  # Steps of the reduction for each slice


@dataclass(frozen=True, slots=True)
class _Shared:
    """The reduction that slices share: its axis and the number of slices.

    A work-item's tile has a multiple of as many elements as there are slices, so that each of them writes as
    many: `lanes` of the last axis of the output, and of its rows `rows` times the sampled number.
    """

    reduced: int
    slices: int
    lanes: int
    written: int
    rows: int


@dataclass(frozen=True, slots=True)
class _SlicedAxis:
    """An axis of the function: its loops, the outermost first, and the group's tile of an output axis.

    The loops of the output are those of groups, work-items and then registers, the vector last; the shared
    reduction's those of the steps that are copied at once, of the slices, and of their own steps.
    """

    number: int
    loops: list[LoopRV]
    items: ExprRV | None  # Work-items along it; None for a reduced axis


def tile_sliced(schedule: Schedule, by: GroupTile, limits: SketchLimits, most: int, slices: int) -> None:
    """Tile a contraction over groups whose work-items share its sums in `slices` slices."""
    before, rest = contraction(schedule, Keep.PADDING if by.shared else Keep.DEAR)
    main = rest[0]
    require(all(is_elementwise(tail, main) for tail in rest[1:]))
    shared = _share(main, most, slices)
    nest = schedule.get_loops(main.block)
    axes = [_split_axis(schedule, loop, number, main, shared, by) for number, loop in enumerate(nest)]
    partial = schedule.rfactor(axes[shared.reduced].loops[1], 0)
    axes = _with_loops(axes, schedule.get_loops(partial))
    tiled = [axes[n] for n in main.spatial]
    group = _add_up(schedule, partial, axes, tiled, shared, by, limits)
    prepare(schedule, before, limits, most, inlined=by.shared)
    items = [axis.items for axis in tiled if axis.items is not None]
    _meet(schedule, rest, group, items, shared.slices)


def _share(main: BlockInfo, most: int, slices: int) -> _Shared:
    """Choose the longest axis of the reduction, and the rows of the output.

    Raises NotApplicable where slices do not fit.
    """
    extents, spatial = main.extents, main.spatial
    lanes = lanes_of(extents[spatial[-1]], most)
    rows = max(1, slices // lanes)
    written = max((n for n in spatial[:-1] if extents[n] > 1), default=spatial[-1])
    available = extents[written] // lanes if written == spatial[-1] else extents[written]
    reduced = max(main.reducing, key=extents.__getitem__)
    steps = extents[reduced]
    require(steps % slices == 0 and available % rows == 0 and steps >= slices * _LEAST_STEPS)
    return _Shared(reduced, slices, lanes, written, rows)


def _split_axis(
    schedule: Schedule, loop: LoopRV, number: int, main: BlockInfo, shared: _Shared, by: GroupTile
) -> _SlicedAxis:
    """Split an axis into its levels; sample the steps of each."""
    if main.kinds[number] == REDUCE:
        if number != shared.reduced:
            return _SlicedAxis(number, [loop], None)
        return _SlicedAxis(number, _split_steps(schedule, loop, shared.slices, by.reduced), None)
    inner: list[LoopRV] = []
    most = by.registers
    if number == main.spatial[-1]:
        most = max(1, most // shared.lanes)
        loop, vector = schedule.split(loop, [None, shared.lanes])
        inner = [vector]
    if number == shared.written:
        loop, rows = schedule.split(loop, [None, shared.rows])
        inner = [rows, *inner]
    loop, held, _ = sample_tile(schedule, loop, most)
    group, thread, items = sample_tile(schedule, loop, by.threads)
    return _SlicedAxis(number, [group, thread, held, *inner], items)


def _split_steps(schedule: Schedule, loop: LoopRV, slices: int, most: int) -> list[LoopRV]:
    """Split a loop into steps copied at once, slices, and the steps of each slice; the numbers stay open.

    The steps of a slice are adjacent, so that compilers read several with one load.
    """
    steps, part = schedule.split(loop, [None, slices])
    copied, mine = schedule.sample_perfect_tile(steps, n=2, max_innermost_factor=most)
    return list(schedule.split(schedule.fuse(steps, part), [copied, slices, mine]))


def _with_loops(axes: Sequence[_SlicedAxis], loops: Sequence[LoopRV]) -> list[_SlicedAxis]:
    """Return the axes with other loops, which are in the same order."""
    left = iter(loops)
    return [_SlicedAxis(axis.number, [next(left) for _ in axis.loops], axis.items) for axis in axes]


def _add_up(
    schedule: Schedule,
    partial: SBlockRV,
    axes: Sequence[_SlicedAxis],
    tiled: Sequence[_SlicedAxis],
    shared: _Shared,
    by: GroupTile,
    limits: SketchLimits,
) -> LoopRV:
    """Schedule the slices' sums; return the loop of the groups."""
    outer, part, inner = axes[shared.reduced].loops
    others = [
        loop for axis in axes if axis.items is None and axis.number != shared.reduced for loop in axis.loops
    ]
    groups, threads = [axis.loops[0] for axis in tiled], [axis.loops[1] for axis in tiled]
    registers = [loop for axis in tiled for loop in axis.loops[2:]]
    schedule.reorder(*groups, part, *threads, outer, inner, *others, *registers)
    group, thread = fuse(schedule, groups), fuse(schedule, threads)
    schedule.bind(group, "blockIdx.x")
    schedule.bind(part, "threadIdx.y")
    schedule.bind(thread, "threadIdx.x")
    kept = store_partial(schedule, partial, thread)
    vectorise(schedule, kept, thread, shared.lanes, limits)
    if by.shared:
        copy_operands(schedule, partial, outer, by, ahead=True)
    write_out(schedule, registers)
    unroll_some(schedule, inner, by.unroll)
    schedule.decompose_reduction(partial, outer)
    return group


def _meet(
    schedule: Schedule, rest: Sequence[BlockInfo], group: LoopRV, items: Sequence[ExprRV], slices: int
) -> None:
    """Have all work-items add the slices' sums up, element by element, and write them through the tail."""
    main = rest[0].block
    schedule.reverse_compute_at(main, group, preserve_unit_loops=True)
    loops = schedule.get_loops(main)
    summed, *tile = loops[len(loops) - 1 - len(items) :]
    element, part, *threads = schedule.split(fuse(schedule, tile), [None, slices, *items])
    schedule.reorder(part, *threads, element, summed)
    schedule.bind(part, "threadIdx.y")
    schedule.bind(fuse(schedule, threads), "threadIdx.x")
    schedule.reverse_compute_at(accumulate(schedule, rest), element, preserve_unit_loops=True)
    schedule.unroll(element)
    schedule.unroll(summed)
    schedule.decompose_reduction(main, summed)


# Tiles of a product that were among the fastest where chosen ones were timed (docs/dev/measurements.md). They
# are adapted to the nearest that the extents allow.

_AHEAD = "software_pipeline_stage"  # Identifies sketches that load ahead
_SLICED = "RFactor"
# Largest ratio of an image's rows or columns to the wanted number: 13 items of 13 columns instead of 8
_NEAR = 1.75
_OCCUPYING = 128  # Work-items of a warp of 32 for each of a compute unit's four schedulers
_LONG = 512  # Terms of sums whose steps take longer than a launch
_IMAGE_LOOPS = 6  # Loops of a convolution at least: batch, channels, rows, columns, and the summed ones


@dataclass(frozen=True, slots=True)
class _AxisTiling:
    """A row of the table, for rows and columns: elements of a work-item, work-items, virtual threads.

    The columns of a work-item count in vectors. Rows of a convolution are its channels; `image` divides the
    rows of its images.
    """

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    reduced: int  # Steps that are copied at once
    image: tuple[int, int, int] = (1, 1, 1)


# Measured on an H100 at 4096^3, 1024^3 and smaller, the largest tile first.
_TILES = (
    _AxisTiling((8, 8, 2), (1, 16, 2), 16),
    _AxisTiling((4, 16, 2), (1, 16, 2), 8),
    _AxisTiling((4, 8, 2), (1, 16, 2), 16),
    _AxisTiling((4, 16, 2), (1, 16, 1), 16),
    _AxisTiling((4, 16, 1), (1, 16, 1), 16),
    _AxisTiling((4, 8, 1), (1, 8, 1), 16),
    _AxisTiling((4, 4, 1), (1, 8, 1), 16),
)
# Tiles for convolutions, also of 3x3 with 32 and 64 channels of 224 x 224: tiles of several rows of an image,
# whose windows share their elements, take a third of the time of those of one row.
_IMAGE_TILES = (
    _AxisTiling((8, 4, 1), (1, 8, 1), 16, (1, 4, 1)),
    _AxisTiling((4, 4, 2), (1, 8, 1), 16, (1, 4, 1)),
    _AxisTiling((8, 8, 1), (1, 8, 1), 16, (1, 2, 1)),
    _AxisTiling((4, 2, 2), (1, 8, 1), 16, (1, 4, 1)),
    _AxisTiling((4, 8, 1), (1, 8, 1), 16, (2, 2, 1)),
)
# Tiles by the number of slices, also at 192 x 512 x 512; those of three rows leave no multiprocessor idle.
_SLICED_TILES = {
    4: (
        _AxisTiling((3, 8, 1), (1, 8, 1), 16),
        _AxisTiling((3, 4, 1), (1, 16, 1), 16),
        _AxisTiling((8, 4, 1), (1, 8, 1), 4),
        _AxisTiling((2, 8, 1), (1, 16, 1), 8),
        _AxisTiling((2, 4, 1), (1, 16, 1), 16),
    ),
    8: (
        _AxisTiling((6, 2, 1), (1, 8, 1), 16),
        _AxisTiling((3, 2, 1), (1, 16, 1), 16),
        _AxisTiling((2, 4, 1), (1, 16, 1), 2),
        _AxisTiling((2, 4, 1), (1, 8, 1), 4),
    ),
}


def slices_of(sketch: ScheduleTrace) -> int | None:
    """Return the slices of a sum that a group shares, 0 for none.

    Return None where a sketch loads nothing ahead: it has no table.
    """
    if _AHEAD not in str(sketch.steps):
        return None
    if _SLICED not in sketch.names:
        return 0
    splits = (step[1][1:] for step in sketch.steps if step[0] == "Split")
    # The middle one of three factors, the only fixed one.
    return next(int(factors[1]) for factors in splits if len(factors) == 3 and isinstance(factors[1], int))


def group_tiles(sketch: ScheduleTrace, slices: int) -> list[ScheduleTrace]:
    """Return the sketch with the numbers of each row of its table.

    For slices, rows that fit unchanged are first.
    """
    extents = [axis[0][1].extent for axis in _axes(sketch)[:-1]]
    image = _is_image(sketch)
    if not slices:
        rows = (*_IMAGE_TILES, *_TILES) if image else _TILES
        return [_sketch_with(sketch, row, _shares(row, extents, image=image)) for row in rows]
    shares = [(row, _shares(row, extents, image=image)) for row in _SLICED_TILES[slices]]
    shares.sort(key=lambda one: any(n % math.prod(m) for n, m in zip(extents, one[1], strict=True)))
    return [_sketch_with(sketch, *one) for one in shares]


def groups_of(start: ScheduleTrace) -> int:
    """Return the work-groups of one of `group_tiles`: the extents of the output outside of all tiles."""
    return math.prod(axis[-1][1].factors[0] for axis in _axes(start)[:-1])


def units_of(start: ScheduleTrace) -> float:
    """Return how many compute units a table's row keeps busy, if each of its work-groups has one.

    Groups of products with long sums, whose work-items wait for every step, count by the schedulers that they
    occupy.
    """
    groups, slices = groups_of(start), slices_of(start)
    if slices is None or _is_image(start):
        return groups
    *tiled, ((_, steps), *_) = _axes(start)
    if steps.extent * max(1, slices) < _LONG:
        return groups
    items = max(1, slices) * math.prod(axis[1][1].factors[-1] for axis in tiled)
    return groups * min(1.0, items / _OCCUPYING)


def _is_image(sketch: ScheduleTrace) -> bool:
    """Return whether a grouped sketch is of a convolution."""
    return next(len(step[-1]) for step in sketch.steps if step[0] == "GetLoops") >= _IMAGE_LOOPS


def _axes(sketch: ScheduleTrace) -> list[list[tuple[int, Tile]]]:
    """Return the tiles of each axis of the output, and the tile of the sum, with the places of their steps.

    An axis has the tile of a work-item, that of the group, and that of virtual threads, which slices lack.
    """
    tiles, levels = sketch.tiles, 2 if _SLICED in sketch.names else 3
    return [tiles[n : n + levels] for n in range(0, len(tiles), levels)]


def _sketch_with(sketch: ScheduleTrace, row: _AxisTiling, shares: Sequence[Sequence[int]]) -> ScheduleTrace:
    """Return the sketch with a row's numbers: factors of an axis are split off one after another.

    Each factor is the largest divisor of the rest that does not exceed the wanted one.
    """
    changed: dict[int, Decision] = {}
    for axis, wanted in zip(_axes(sketch), [*shares, [row.reduced]], strict=True):
        extent = axis[0][1].extent
        for (place, tile), want in zip(axis, wanted, strict=False):
            factor = divisors(extent, min(want, tile.most))[-1]
            changed[place] = tile.cut(factor, extent)
            extent //= factor
    return sketch.with_most(changed)


def _shares(row: _AxisTiling, extents: Sequence[int], *, image: bool) -> list[list[int]]:
    """Return each axis' share of a tile.

    Where an image has too few columns for a tile, its rows make up for it.
    """
    shares = [[1, 1, 1] for _ in extents]
    shares[-1] = list(row.columns)
    if len(extents) > 1 + image:
        shares[-2 - image] = list(row.rows)
    if image and len(extents) > 1:
        shares[-1] = _near(extents[-1], row.columns)
        lacking = (want // had for want, had in zip(row.columns, shares[-1], strict=True))
        wanted = [rows * max(1, times) for rows, times in zip(row.image, lacking, strict=True)]
        shares[-2] = _near(extents[-2], wanted)
    return shares


def _near(extent: int, wanted: Sequence[int]) -> list[int]:
    """Split off factors one after another, each the divisor of the rest that is nearest, by ratio."""
    found = list[int]()
    for want in wanted:
        ratios = {abs(math.log(d / want)): d for d in reversed(divisors(extent)) if d <= _NEAR * want}
        found.append(ratios[min(ratios)])
        extent //= found[-1]
    return found
