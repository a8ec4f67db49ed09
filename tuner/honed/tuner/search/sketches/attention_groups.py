"""The attention sketch for groups: the work-items of a group share a tile of rows, whose scores they keep.

Scores are in local memory. Work-items are two-dimensional: along y they share out the rows, along x the keys
of the scores, then what is added up or found along these, then the columns of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from honed.tuner.search.parts import (
    SketchLimits,
    below,
    fuse,
    lanes_of,
    sample_any,
    sample_tile,
    set_private,
    unroll_some,
    write_out,
)

from .attention import Attention, read, written_axes
from .grouped import GroupTile

_ACROSS = (32, 16, 8, 4)  # work-items along x, to choose from


@dataclass(frozen=True, slots=True)
class _HeadGroup:
    """Work-items of a group along both axes, and rows that each has."""

    high: ExprRV
    wide: ExprRV
    rows: ExprRV


def attention_groups(
    schedule: Schedule, by: GroupTile, limits: SketchLimits, most: int, *, copied: bool
) -> bool:
    """A group has some rows, and keeps their scores. False where the function is no attention.

    With `copied` what is multiplied goes through local memory, else each work-item reads what it multiplies.
    """
    one = read(schedule)
    if one is None:
        return False
    places = written_axes(schedule, one)
    last = one.tail.block if one.tail else schedule.cache_write(one.product.block, 0, "local")
    loops, row = schedule.get_loops(last), places[-2]
    outer, rows, held = sample_tile(schedule, loops[row], limits.tile)
    outer, high, items = sample_tile(schedule, outer, by.threads)
    lanes = lanes_of(one.columns, most)
    group = _HeadGroup(items, _wide(schedule, one, lanes, most), held)
    across, wide, vectors, vector = _shared_out(schedule, loops[-1], group, lanes, limits)
    grid = [outer if n == row else loop for n, loop in enumerate(loops[:-1])]
    schedule.reorder(*grid, across, high, wide, rows, vectors, vector)
    under = fuse(schedule, grid)
    schedule.bind(under, "blockIdx.x")
    _bind(schedule, high, wide)
    write_out(schedule, [rows, vectors, vector])
    _multiply(schedule, one.product.block, wide, lanes, by, copied=copied)
    _share_rows(schedule, one, under, group)
    _score(schedule, one, under, group, by, limits, most, copied=copied)
    return True


def _wide(schedule: Schedule, one: Attention, lanes: int, most: int) -> ExprRV:
    """How many work-items there are along x, left open: they divide the keys as well as the columns."""
    keys, columns = one.keys // lanes_of(one.keys, most), one.columns // lanes
    fitting = [n for n in _ACROSS if keys % n == columns % n == 0]
    if not fitting:
        raise ValueError("keys and columns are not divided by as many work-items")
    return sample_any(schedule, fitting)


def _shared_out(
    schedule: Schedule, loop: LoopRV, group: _HeadGroup, lanes: int, limits: SketchLimits
) -> tuple[LoopRV, LoopRV, LoopRV, LoopRV]:
    """Split a loop into turns, work-items along x, the vectors of each, how many is left open, and lanes."""
    rest, vector = schedule.split(loop, [None, lanes])
    steps, wide = schedule.split(rest, [None, group.wide])
    turns, vectors = schedule.sample_perfect_tile(steps, n=2, max_innermost_factor=limits.tile)
    return (*schedule.split(schedule.fuse(steps, wide), [turns, group.wide, vectors]), vector)


def _bind(schedule: Schedule, high: LoopRV, wide: LoopRV) -> None:
    schedule.bind(high, "threadIdx.y")
    schedule.bind(wide, "threadIdx.x")


def _multiply(
    schedule: Schedule, block: SBlockRV, at: LoopRV, lanes: int, by: GroupTile, *, copied: bool
) -> None:
    """Compute the tile of a work-item of a product in registers, under a loop."""
    schedule.compute_at(block, at, preserve_unit_loops=True)
    set_private(schedule, block)
    *_, rows, columns, summed = below(schedule, block, at)
    outer, steps, _ = sample_tile(schedule, summed, by.reduced)
    vectors, vector = schedule.split(columns, [None, lanes])
    schedule.reorder(outer, steps, rows, vectors, vector)
    if copied:
        _copy(schedule, block, outer, by)
    write_out(schedule, [rows, vectors, vector])
    unroll_some(schedule, steps, by.unroll)
    schedule.decompose_reduction(block, outer)


def _copy(schedule: Schedule, block: SBlockRV, at: LoopRV, by: GroupTile) -> None:
    """Copy what a product reads of global memory into local memory, in vectors of an open length."""
    for number, one in enumerate(schedule.get(block).reads):
        if str(one.source.scope()) == "shared":
            continue
        copy = schedule.cache_read(block, number, "shared")
        schedule.compute_at(copy, at, preserve_unit_loops=True)
        fuse(schedule, schedule.get_loops(copy)[-len(one.source.shape) :])
        schedule.annotate(copy, "meta_schedule.cooperative_fetch", sample_any(schedule, by.copied))


def _share_rows(schedule: Schedule, one: Attention, under: LoopRV, group: _HeadGroup) -> None:
    """Compute all that is made of the scores in local memory, each row by the work-items along x."""
    for part in reversed(one.rows):
        schedule.compute_at(part.block, under, preserve_unit_loops=True)
        for number in range(len(schedule.get(part.block).writes)):
            schedule.set_scope(part.block, number, "shared")
        *_, rows, keys = below(schedule, part.block, under)
        high, mine = schedule.split(rows, [group.high, group.rows])
        turns, wide = schedule.split(keys, [None, group.wide])
        schedule.reorder(high, mine, turns, wide)
        _bind(schedule, high, wide)


def _score(
    schedule: Schedule,
    one: Attention,
    under: LoopRV,
    group: _HeadGroup,
    by: GroupTile,
    limits: SketchLimits,
    most: int,
    *,
    copied: bool,
) -> None:
    """Compute the scores of a group's rows into local memory."""
    kept = schedule.cache_write(one.scores.block, 0, "local")
    schedule.compute_at(kept, under, preserve_unit_loops=True)
    schedule.set_scope(kept, 0, "shared")
    *_, tile, keys = below(schedule, kept, under)
    lanes = lanes_of(one.keys, most)
    high, rows = schedule.split(tile, [group.high, group.rows])
    across, wide, vectors, vector = _shared_out(schedule, keys, group, lanes, limits)
    schedule.reorder(across, high, wide, rows, vectors, vector)
    _bind(schedule, high, wide)
    write_out(schedule, [rows, vectors, vector])
    _multiply(schedule, one.scores.block, wide, lanes, by, copied=copied)
