"""The held sketch: a work-item holds tiles of its operands in registers while it multiplies them.

For contractions on devices whose compilers load every operand where it stands. An operand that lies along the
reduction (the rows of a left matrix) is loaded in vectors of several steps before the first of them, one that
lies along the lanes (the rows of a right matrix) in whole vectors step by step; every multiplication then
reads registers. Work-items are two-dimensional, neighbours along the lanes, so that what a warp loads of one
row lies side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from honed.tuner.search.blocks import REDUCE, Keep, last_axis
from honed.tuner.search.flat import flatten
from honed.tuner.search.parts import (
    BlockPart,
    SketchLimits,
    accumulate,
    below,
    by_single_items,
    contraction,
    fuse,
    lanes_of,
    launch_others,
    sample_tile,
    sketch,
    vectorise,
    write_out,
)

_MOST_WINDOW = 25  # steps of a convolution's window that are written out: 5 x 5


@dataclass(frozen=True, slots=True)
class _HeldTile:
    """What a work-item has of one axis: the loop, and how many steps, open or fixed."""

    loop: LoopRV
    steps: ExprRV | int


@dataclass(slots=True)
class _HeldLoops:
    """The loops of a contraction by level; `tiles` are those of a work-item, by the number of their axis."""

    groups: list[LoopRV]
    threads: list[LoopRV]  # at most two: of the rows, then of the lanes
    outside: list[LoopRV]  # of the reduction; operands along it are held under the last of them
    inside: list[int]  # the reduction's axes that are written out
    vector: list[LoopRV]  # the lanes
    tiles: dict[int, _HeldTile]


@sketch(10)
def held(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile a contraction over work-items that hold its operands. False where the function is none."""
    found = contraction(schedule, Keep.PADDING) if by_single_items(limits) else None
    if found is None:
        return False
    before, rest = found
    rest = flatten(schedule, before, rest) or rest
    main = rest[0]
    along = [last_axis(schedule, main.block, n) for n in range(len(schedule.get(main.block).reads))]
    if None in along:
        return False
    lanes = lanes_of(main.info.extents[main.info.spatial[-1]], most)
    loops = _split(schedule, main, limits, lanes)
    if any(axis not in loops.tiles for axis in along):
        return False
    written_out = [loops.tiles[n].loop for n in loops.inside]
    spatial = [loops.tiles[n].loop for n in main.info.spatial if n in loops.tiles]
    schedule.reorder(*loops.groups, *loops.threads, *loops.outside, *written_out, *spatial, *loops.vector)
    under = _bind(schedule, loops)
    tail = accumulate(schedule, rest)
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    vectorise(schedule, tail, under, lanes, limits)
    laned = main.info.spatial[-1]
    for number, axis in enumerate(along):
        assert axis is not None
        at = loops.outside[-1] if main.info.kinds[axis] == REDUCE else written_out[-1]
        width = lanes if axis == laned else loops.tiles[axis].steps
        _hold(schedule, main.block, number, at, width)
    write_out(schedule, [*written_out, *spatial, *loops.vector])
    schedule.decompose_reduction(main.block, loops.outside[0])
    launch_others(schedule, before, rest, limits, most)
    return True


def _split(schedule: Schedule, main: BlockPart, limits: SketchLimits, lanes: int) -> _HeldLoops:
    """Split the axes; the last of the output has the lanes, the one before it the rows of a group."""
    found = _HeldLoops([], [], [], [], [], {})
    loops, what = schedule.get_loops(main.block), main.info
    *others, last = what.spatial
    rows = max((n for n in others if what.extents[n] > 1), default=None)
    for n in others:
        loop = loops[n]
        if what.extents[n] > 1:
            loop, found.tiles[n] = _tile(schedule, loop, limits.tile)
        if n == rows:
            loop, threads = _threads(schedule, loop, limits)
            found.threads.append(threads)
        found.groups.append(loop)
    vectors, vector = schedule.split(loops[last], [None, lanes])
    found.vector.append(vector)
    outer, found.tiles[last] = _tile(schedule, vectors, limits.vectors)
    outer, threads = _threads(schedule, outer, limits)
    found.groups.append(outer)
    found.threads.append(threads)
    long = [n for n in what.reducing if what.extents[n] > 1]
    found.outside = [loops[n] for n in what.reducing if n not in long]
    if len(long) == 1:
        most = min(limits.unroll, limits.vector_bytes // _element_bytes(schedule, main))
        outer, found.tiles[long[0]] = _tile(schedule, loops[long[0]], most)
        found.outside.append(outer)
        found.inside = long
        return found
    if math.prod(what.extents[n] for n in long[1:]) > _MOST_WINDOW:
        raise ValueError("a window is too large to be written out")
    found.outside.append(loops[long[0]])
    found.inside = long[1:]
    found.tiles |= {n: _HeldTile(loops[n], what.extents[n]) for n in found.inside}
    return found


def _element_bytes(schedule: Schedule, main: BlockPart) -> int:
    """Of the operand with the widest elements."""
    return max(int(read.source.dtype.bits) for read in schedule.get(main.block).reads) // 8


def _tile(schedule: Schedule, loop: LoopRV, most: int) -> tuple[LoopRV, _HeldTile]:
    """Split off at most `most` steps of a loop for a work-item; how many is left open."""
    outer, inner, steps = sample_tile(schedule, loop, most)
    return outer, _HeldTile(inner, steps)


def _threads(schedule: Schedule, loop: LoopRV, limits: SketchLimits) -> tuple[LoopRV, LoopRV]:
    """Split off the work-items of a group."""
    outer, inner, _ = sample_tile(schedule, loop, max(limits.threads))
    return outer, inner


def _bind(schedule: Schedule, loops: _HeldLoops) -> LoopRV:
    """Bind groups and work-items, the lanes' axis to x; returns the loop that a work-item runs under."""
    *others, along = loops.groups
    if others:
        schedule.bind(fuse(schedule, others), "blockIdx.y")
    schedule.bind(along, "blockIdx.x")
    for loop, tag in zip(reversed(loops.threads), ("threadIdx.x", "threadIdx.y"), strict=False):
        schedule.bind(loop, tag)
    return loops.threads[-1]


def _hold(schedule: Schedule, main: SBlockRV, read: int, at: LoopRV, width: ExprRV | int) -> None:
    """Load the tile of an operand into registers under a loop, in vectors of `width` along its last axis."""
    dimensions = [int(extent) for extent in schedule.get(main).reads[read].source.shape]
    copy = schedule.cache_read(main, read, "local")
    schedule.compute_at(copy, at, preserve_unit_loops=True)
    inner = below(schedule, copy, at)
    units = next(n for n, extent in enumerate(reversed(dimensions)) if extent > 1)
    last = fuse(schedule, inner[len(inner) - 1 - units :])
    rest, vector = schedule.split(last, [None, width])
    schedule.vectorize(vector)
    for loop in (*inner[: len(inner) - 1 - units], rest):
        schedule.unroll(loop)
