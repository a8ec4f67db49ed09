"""The sliced sketch: the work-items of a group share a contraction's sums as well as its tile.

For products with few outputs and long sums, whose tiles alone keep few work-items busy. Every slice of a
group adds up its own steps of the reduction, for the whole tile; the slices' sums meet in local memory, where
all work-items together add them up and write the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from honed.tuner.search.blocks import REDUCE, Keep
from honed.tuner.search.parts import (
    BlockPart,
    SketchLimits,
    accumulate,
    contraction,
    fuse,
    is_elementwise,
    lanes_of,
    sample_tile,
    unroll_some,
    vectorise,
    write_out,
)

from .grouped import GroupTile, copy_operands, prepare

SLICES = (4, 8)  # of a group, to choose from
_LEAST_STEPS = 8  # of the reduction, for each slice


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the slices share: the axis of the reduction, and how many slices there are.

    A work-item's tile has a multiple of as many elements as there are slices, so that each of them writes as
    many: `lanes` of the last axis of the output, and of its rows `rows` times what is left open.
    """

    reduced: int
    slices: int
    lanes: int
    written: int
    rows: int


@dataclass(frozen=True, slots=True)
class _SlicedAxis:
    """An axis of the function: its loops, the outermost first, and of the output's the tile of a group.

    The loops of the output are those of groups, work-items and then registers, the vector last; the shared
    reduction's those of the steps that are copied at once, of the slices, and of their own steps.
    """

    number: int
    loops: list[LoopRV]
    items: ExprRV | None  # work-items along it; None for what is reduced


def sliced(schedule: Schedule, by: GroupTile, limits: SketchLimits, most: int, slices: int) -> bool:
    """Tile a contraction over groups whose work-items share its sums in so many slices.

    False where the function is none, or too small.
    """
    found = contraction(schedule, Keep.PADDING if by.shared else Keep.DEAR)
    if found is None:
        return False
    before, rest = found
    main = rest[0]
    if len(rest) == 2 and not is_elementwise(rest[1], main):
        return False
    shared = _share(main, most, slices)
    if shared is None:
        return False
    nest = schedule.get_loops(main.block)
    axes = [_split(schedule, loop, number, main, shared, by) for number, loop in enumerate(nest)]
    partial = schedule.rfactor(axes[shared.reduced].loops[1], 0)
    axes = _renamed(axes, schedule.get_loops(partial))
    tiled = [axes[n] for n in main.info.spatial]
    group = _add_up(schedule, partial, axes, tiled, shared, by, limits)
    prepare(schedule, before, limits, most, inlined=by.shared)
    items = [axis.items for axis in tiled if axis.items is not None]
    _meet(schedule, rest, group, items, shared.slices)
    return True


def _share(main: BlockPart, most: int, slices: int) -> _Shared | None:
    """Choose the longest axis of the reduction, and the rows of the output; None where slices do not fit."""
    extents, spatial = main.info.extents, main.info.spatial
    lanes = lanes_of(extents[spatial[-1]], most)
    rows = max(1, slices // lanes)
    written = max((n for n in spatial[:-1] if extents[n] > 1), default=spatial[-1])
    available = extents[written] // lanes if written == spatial[-1] else extents[written]
    reduced = max(main.info.reducing, key=extents.__getitem__)
    steps = extents[reduced]
    if steps % slices or available % rows or steps < slices * _LEAST_STEPS:
        return None
    return _Shared(reduced, slices, lanes, written, rows)


def _split(
    schedule: Schedule, loop: LoopRV, number: int, main: BlockPart, shared: _Shared, by: GroupTile
) -> _SlicedAxis:
    """Split an axis into its levels; how many steps each has is left open."""
    if main.info.kinds[number] == REDUCE:
        if number != shared.reduced:
            return _SlicedAxis(number, [loop], None)
        return _SlicedAxis(number, _split_steps(schedule, loop, shared.slices, by.reduced), None)
    inner: list[LoopRV] = []
    most = by.registers
    if number == main.info.spatial[-1]:
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
    """Steps that are copied at once, slices, and the steps of each, how many is left open.

    Those of a slice lie side by side, so that compilers read several with one load.
    """
    steps, part = schedule.split(loop, [None, slices])
    copied, mine = schedule.sample_perfect_tile(steps, n=2, max_innermost_factor=most)
    return list(schedule.split(schedule.fuse(steps, part), [copied, slices, mine]))


def _renamed(axes: Sequence[_SlicedAxis], loops: Sequence[LoopRV]) -> list[_SlicedAxis]:
    """The same axes with other loops, which stand in the same order."""
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
    """Schedule the slices' sums; returns the loop of the groups."""
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
    kept = schedule.cache_write(partial, 0, "local")
    schedule.reverse_compute_at(kept, thread, preserve_unit_loops=True)
    schedule.set_scope(kept, 0, "shared")
    vectorise(schedule, kept, thread, shared.lanes, limits)
    if by.shared:
        copy_operands(schedule, partial, outer, by, ahead=True)
    write_out(schedule, registers)
    unroll_some(schedule, inner, by.unroll)
    schedule.decompose_reduction(partial, outer)
    return group


def _meet(
    schedule: Schedule, rest: Sequence[BlockPart], group: LoopRV, items: Sequence[ExprRV], slices: int
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
