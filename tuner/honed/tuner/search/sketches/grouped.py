"""The grouped sketch: the work-items of a group compute a tile of a contraction together.

Each axis of the output is split into groups, virtual threads, threads and registers, each level with a bound
of its own, so that most draws fit the device; operands are copied through local memory where that pays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.tuner.search.blocks import CHOICES, BlockInfo, Keep, calls, is_dear
from honed.tuner.search.parts import (
    BlockPart,
    SketchLimits,
    accumulate,
    alone,
    contraction,
    fuse,
    lanes_of,
    launch_others,
    sample_any,
    sample_tile,
    unroll_some,
    write_out,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTile:
    """How far the grouped sketch may go."""

    shared: bool  # copy the operands of a group's tile through local memory
    copied: tuple[int, ...]  # elements of one load of such a copy, to choose from
    registers: int  # elements of a work-item's tile, along one axis
    threads: int  # work-items of a group, along one axis
    virtual: int  # tiles of a work-item, strided by the group's tile, along one axis; 1: none
    reduced: int  # elements of the outer reduction that are taken at once
    sliced: int  # most outputs of a contraction whose sums the work-items of a group share
    unroll: tuple[int, ...]  # steps to choose from


@dataclass(slots=True)
class _Levels:
    """The loops of the output's axes, outermost level first."""

    groups: list[LoopRV]
    virtual: list[LoopRV]
    threads: list[LoopRV]
    registers: list[LoopRV]


def grouped(
    schedule: Schedule, by: GroupTile, limits: SketchLimits, most: int, *, ahead: bool = False
) -> bool:
    """Tile a contraction over groups. False where the function is none.

    With `ahead` a group loads its next operands into registers while it multiplies those in local memory.
    """
    found = contraction(schedule, Keep.PADDING if by.shared else Keep.DEAR)
    if found is None:
        return False
    before, rest = found
    main = rest[0]
    loops = schedule.get_loops(main.block)
    spatial = [(loops[n], main.info.extents[n]) for n in main.info.spatial]
    reduce = [loops[n] for n in main.info.reducing]
    levels = _split(schedule, spatial, by, most)
    outer, inner, _ = sample_tile(schedule, reduce[0], _taken_at_once(main.info, by))
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
    return True


def _taken_at_once(contracted: BlockInfo, by: GroupTile) -> int:
    """The most steps of the outer reduction: few where each is a window, as windows share their elements."""
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
    """Have the group copy what its tile reads into local memory, in vectors of an open length."""
    reads = schedule.get(main).reads
    for number, read in enumerate(reads):
        copy = schedule.cache_read(main, number, "shared")
        schedule.compute_at(copy, at, preserve_unit_loops=True)
        axes = len(read.source.shape)
        fuse(schedule, schedule.get_loops(copy)[-axes:])
        chosen = any(calls(schedule, b, CHOICES) for b in schedule.get_producers(copy))
        copied = (1,) if chosen else by.copied  # a vector whose lanes choose differently cannot be generated
        schedule.annotate(copy, "meta_schedule.cooperative_fetch", sample_any(schedule, copied))
        if ahead:
            schedule.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    if ahead:
        _pipeline(schedule, at, len(reads))


def _pipeline(schedule: Schedule, loop: LoopRV, copies: int) -> None:
    """Run the steps of a loop in the order: load into registers, multiply, move on into local memory.

    The loop's statements are a load and a store for each copy, and the multiplication, a step behind them.
    """
    loads, stores = range(copies), range(copies + 1, 2 * copies + 1)
    order = [place for pair in zip(loads, stores, strict=True) for place in pair]
    schedule.annotate(loop, "software_pipeline_stage", [0] * (2 * copies) + [1])
    schedule.annotate(loop, "software_pipeline_order", [*order, copies])


def prepare(
    schedule: Schedule, before: list[BlockPart], limits: SketchLimits, most: int, *, inlined: bool
) -> None:
    """Compute what operands are made from: while they are copied, or where dear in a launch before."""
    for part in reversed(before):
        if inlined and not is_dear(schedule, part.block):
            schedule.compute_inline(part.block)
            continue
        alone(schedule, part, limits, most)
