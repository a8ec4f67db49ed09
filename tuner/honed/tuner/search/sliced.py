"""The sliced sketch: the work-items of a group share a contraction's sums as well as its tile.

For products with few outputs and long sums, whose tiles alone keep few work-items busy. Every slice of a
group adds up its own steps of the reduction, for the whole tile; the slices' sums meet in local memory, where
each slice adds up and writes a part of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from .blocks import REDUCE, SPATIAL, Keep
from .grouped import GroupTile, copy_operands, prepare
from .parts import (
    Part,
    SketchLimits,
    fuse,
    is_contraction,
    is_elementwise,
    lanes_of,
    parts,
    set_private,
    vectorise,
)

SLICES = (4, 8)  # of a group, to choose from
_LEAST_STEPS = 8  # of the reduction, for each slice


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the slices share: the axis of the reduction, that of the output, and how many slices there are."""

    reduced: int
    written: int
    slices: int
    lanes: int


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of the function: its loops, the outermost first, and of the output's the tile of a group.

    The loops of the output are those of groups, work-items and then registers, the vector last; the shared
    reduction's those of the steps that are copied at once, of their parts, and of the slices.
    """

    number: int
    loops: list[LoopRV]
    tile: list[ExprRV | int]  # work-items, of the shared axis the slices, registers, of the last axis lanes


def sliced(schedule: Schedule, by: GroupTile, limits: SketchLimits, most: int, slices: int) -> bool:
    """Tile a contraction over groups whose work-items share its sums in so many slices.

    False where the function is none, or too small.
    """
    found = parts(schedule, Keep.PADDING if by.shared else Keep.DEAR)
    before = [p for p in found if not p.info.is_reduction and p is not found[-1]]
    rest = found[len(before) :]
    if [p.info.is_reduction for p in rest] not in ([True], [True, False]):
        return False
    main = rest[0]
    if not is_contraction(schedule, found) or (len(rest) == 2 and not is_elementwise(rest[1], main)):
        return False
    shared = _share(main, most, slices)
    if shared is None:
        return False
    nest = schedule.get_loops(main.block)
    axes = [_split(schedule, loop, number, main, shared, by) for number, loop in enumerate(nest)]
    partial = schedule.rfactor(axes[shared.reduced].loops[-1], 0)
    axes = _renamed(axes, schedule.get_loops(partial))
    tiled = [axes[n] for n in _spatial(main)]
    group = _add_up(schedule, partial, axes, tiled, shared, by, limits)
    prepare(schedule, before, limits, most, inlined=by.shared)
    _meet(schedule, rest, group, tiled, shared)
    return True


def _spatial(main: Part) -> list[int]:
    return [n for n, kind in enumerate(main.info.kinds) if kind == SPATIAL]


def _share(main: Part, most: int, slices: int) -> _Shared | None:
    """Choose the longest axis of the reduction, and the rows of the output; None where slices do not fit."""
    extents, spatial = main.info.extents, _spatial(main)
    if not spatial:
        return None
    lanes = lanes_of(extents[spatial[-1]], most)
    written = max((n for n in spatial[:-1] if extents[n] > 1), default=spatial[-1])
    rows = extents[written] // lanes if written == spatial[-1] else extents[written]
    reduced = max((n for n, kind in enumerate(main.info.kinds) if kind == REDUCE), key=extents.__getitem__)
    steps = extents[reduced]
    if steps % slices or rows % slices or steps < slices * _LEAST_STEPS:
        return None
    return _Shared(reduced, written, slices, lanes)


def _split(
    schedule: Schedule, loop: LoopRV, number: int, main: Part, shared: _Shared, by: GroupTile
) -> _Axis:
    """Split an axis into its levels; how many steps each has is left open."""
    if main.info.kinds[number] == REDUCE:
        if number != shared.reduced:
            return _Axis(number, [loop], [])
        steps, part = schedule.split(loop, [None, shared.slices])
        factors = schedule.sample_perfect_tile(steps, n=2, max_innermost_factor=by.reduced)
        return _Axis(number, [*schedule.split(steps, factors), part], [])
    inner: list[LoopRV] = []
    lanes, share = list[ExprRV | int](), list[ExprRV | int]()
    if number == _spatial(main)[-1]:
        lanes = [shared.lanes]
        loop, vector = schedule.split(loop, [None, shared.lanes])
        inner = [vector]
    if number == shared.written:
        share = [shared.slices]
        loop, shares = schedule.split(loop, [None, shared.slices])
        inner = [shares, *inner]
    most = max(1, by.registers // shared.lanes) if lanes else by.registers
    registers = schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=most)
    loop, held = schedule.split(loop, registers)
    items = schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=by.threads)
    group, thread = schedule.split(loop, items)
    return _Axis(number, [group, thread, held, *inner], [items[1], *share, registers[1], *lanes])


def _renamed(axes: Sequence[_Axis], loops: Sequence[LoopRV]) -> list[_Axis]:
    """The same axes with other loops, which stand in the same order."""
    left = iter(loops)
    return [_Axis(axis.number, [next(left) for _ in axis.loops], axis.tile) for axis in axes]


def _add_up(
    schedule: Schedule,
    partial: SBlockRV,
    axes: Sequence[_Axis],
    tiled: Sequence[_Axis],
    shared: _Shared,
    by: GroupTile,
    limits: SketchLimits,
) -> LoopRV:
    """Schedule the slices' sums; returns the loop of the groups."""
    outer, inner, part = axes[shared.reduced].loops
    others = [loop for axis in axes if not axis.tile and axis.number != shared.reduced for loop in axis.loops]
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
    schedule.vectorize(registers[-1])
    for loop in registers[:-1]:
        schedule.unroll(loop)
    steps = schedule.sample_categorical(list(by.unroll), [1.0 / len(by.unroll)] * len(by.unroll))
    schedule.annotate(inner, "pragma_auto_unroll_max_step", steps)
    schedule.decompose_reduction(partial, outer)
    return group


def _meet(
    schedule: Schedule, rest: Sequence[Part], group: LoopRV, tiled: Sequence[_Axis], shared: _Shared
) -> None:
    """Add the slices' sums up, each slice those of its part of the tile, and write them through the tail."""
    main = rest[0].block
    schedule.reverse_compute_at(main, group, preserve_unit_loops=True)
    loops = schedule.get_loops(main)
    summed, *tiles = loops[len(loops) - 1 - len(tiled) :]
    threads, registers = list[LoopRV](), list[LoopRV]()
    for loop, axis in zip(tiles, tiled, strict=True):
        thread, *inner = schedule.split(loop, axis.tile)
        if axis.number == shared.written:
            share, *inner = inner
        threads.append(thread)
        registers += inner
    schedule.reorder(*threads, share, *registers[:-1], summed, registers[-1])
    schedule.bind(fuse(schedule, threads), "threadIdx.x")
    schedule.bind(share, "threadIdx.y")
    if len(rest) == 2:
        set_private(schedule, main)
        tail = rest[1].block
    else:
        tail = schedule.cache_write(main, 0, "local")
    schedule.reverse_compute_at(tail, share, preserve_unit_loops=True)
    _, vector = schedule.split(schedule.get_loops(tail)[-1], [None, shared.lanes])
    schedule.vectorize(vector)
    schedule.vectorize(registers[-1])
    schedule.unroll(summed)
    schedule.decompose_reduction(main, summed)
