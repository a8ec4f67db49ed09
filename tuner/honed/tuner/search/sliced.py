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
from .grouped import GroupTile, copy_operands, prepare, two
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

_SLICES = (2, 4, 8, 16)
_LEAST_STEPS = 8  # of the reduction, for each slice


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of the output: its loops by level, and of what a group's tile of it is made."""

    group: LoopRV
    thread: LoopRV
    registers: list[LoopRV]
    factors: list[ExprRV | int]  # threads, then what each of them has: where slices share it, theirs first


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the slices share: the axis of the reduction, that of the output, and how many slices there are."""

    reduced: int
    written: int
    slices: ExprRV
    lanes: int


def sliced(schedule: Schedule, by: GroupTile, limits: SketchLimits, most: int) -> bool:
    """Tile a contraction over groups whose work-items share its sums. False where the function is none."""
    found = parts(schedule, Keep.PADDING if by.shared else Keep.DEAR)
    before = [p for p in found if not p.info.is_reduction and p is not found[-1]]
    rest = found[len(before) :]
    if [p.info.is_reduction for p in rest] not in ([True], [True, False]):
        return False
    main = rest[0]
    if not is_contraction(schedule, found) or (len(rest) == 2 and not is_elementwise(rest[1], main)):
        return False
    shared = _share(schedule, main, most)
    if shared is None:
        return False
    partial = _slice(schedule, main, shared)
    group, axes = _add_up(schedule, partial, main, shared, by, limits)
    prepare(schedule, before, limits, most, inlined=by.shared)
    _meet(schedule, rest, group, axes, shared)
    return True


def _spatial(main: Part) -> list[int]:
    return [n for n, kind in enumerate(main.info.kinds) if kind == SPATIAL]


def _share(schedule: Schedule, main: Part, most: int) -> _Shared | None:
    """Choose the longest axis of the reduction, and the rows of the output; None where they are too short."""
    extents, spatial = main.info.extents, _spatial(main)
    if not spatial:
        return None
    lanes = lanes_of(extents[spatial[-1]], most)
    written = max((n for n in spatial[:-1] if extents[n] > 1), default=spatial[-1])
    rows = extents[written] // lanes if written == spatial[-1] else extents[written]
    reduced = max((n for n, kind in enumerate(main.info.kinds) if kind == REDUCE), key=extents.__getitem__)
    fitting = [
        s for s in _SLICES if extents[reduced] % s == rows % s == 0 and extents[reduced] >= s * _LEAST_STEPS
    ]
    if not fitting:
        return None
    slices = schedule.sample_categorical(fitting, [1.0 / len(fitting)] * len(fitting))
    return _Shared(reduced, written, slices, lanes)


def _slice(schedule: Schedule, main: Part, shared: _Shared) -> SBlockRV:
    """Split every slice's sums off; the block that adds them up."""
    loop = schedule.get_loops(main.block)[shared.reduced]
    _, part = schedule.split(loop, [None, shared.slices])
    return schedule.rfactor(part, 0)


def _add_up(
    schedule: Schedule, partial: SBlockRV, main: Part, shared: _Shared, by: GroupTile, limits: SketchLimits
) -> tuple[LoopRV, list[_Axis]]:
    """Schedule the slices' sums; returns the loop of the groups and the output's axes."""
    loops = schedule.get_loops(partial)
    part = loops.pop(shared.reduced + 1)
    axes = [_axis(schedule, loops[n], n, main, shared, by) for n in _spatial(main)]
    others = [loops[n] for n, kind in enumerate(main.info.kinds) if kind == REDUCE and n != shared.reduced]
    outer, inner = two(schedule, loops[shared.reduced], by.reduced)
    registers = [loop for axis in axes for loop in axis.registers]
    threads = [axis.thread for axis in axes]
    schedule.reorder(*(axis.group for axis in axes), part, *threads, outer, inner, *others, *registers)
    group = fuse(schedule, [axis.group for axis in axes])
    schedule.bind(group, "blockIdx.x")
    schedule.bind(part, "threadIdx.y")
    thread = fuse(schedule, threads)
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
    return group, axes


def _axis(schedule: Schedule, loop: LoopRV, number: int, main: Part, shared: _Shared, by: GroupTile) -> _Axis:
    """Split an axis of the output into groups, threads and registers."""
    vector: list[LoopRV] = []
    own: list[LoopRV] = []
    last = number == _spatial(main)[-1]
    if last:
        loop, lanes = schedule.split(loop, [None, shared.lanes])
        vector = [lanes]
    if number == shared.written:
        loop, share = schedule.split(loop, [None, shared.slices])
        own = [share]
    most = max(1, by.registers // (shared.lanes if last else 1))
    tile = schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=most)
    loop, registers = schedule.split(loop, tile)
    items = schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=by.threads)
    group, thread = schedule.split(loop, items)
    factors = [items[1], *([shared.slices] if own else []), tile[1], *([shared.lanes] if last else [])]
    return _Axis(group, thread, [registers, *own, *vector], factors)


def _meet(
    schedule: Schedule, rest: Sequence[Part], group: LoopRV, axes: Sequence[_Axis], shared: _Shared
) -> None:
    """Add the slices' sums up, each slice those of its part of the tile, and write them through the tail."""
    main = rest[0].block
    schedule.reverse_compute_at(main, group, preserve_unit_loops=True)
    loops = schedule.get_loops(main)
    summed, *tiles = loops[len(loops) - 1 - len(axes) :]
    split = [schedule.split(loop, axis.factors) for loop, axis in zip(tiles, axes, strict=True)]
    share = next(n for n, axis in enumerate(_spatial(rest[0])) if axis == shared.written)
    threads = [factors[0] for factors in split]
    each = [loop for n, factors in enumerate(split) for loop in factors[2 if n == share else 1 :]]
    schedule.reorder(*threads, split[share][1], *each[:-1], summed, each[-1])
    schedule.bind(fuse(schedule, threads), "threadIdx.x")
    schedule.bind(split[share][1], "threadIdx.y")
    if len(rest) == 2:
        set_private(schedule, main)
        tail = rest[1].block
    else:
        tail = schedule.cache_write(main, 0, "local")
    schedule.reverse_compute_at(tail, split[share][1], preserve_unit_loops=True)
    inner = schedule.get_loops(tail)
    _, vector = schedule.split(inner[-1], [None, shared.lanes])
    schedule.vectorize(vector)
    schedule.vectorize(each[-1])
    schedule.unroll(summed)
    schedule.decompose_reduction(main, summed)
