"""Provides sketches whose work-items have whole rows, columns or vectors, with and without reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from honed.tuner.search.parts import (
    REDUCE,
    SPATIAL,
    WARP,
    BlockInfo,
    Keep,
    SketchLimits,
    alone,
    axes_kept,
    below,
    bind,
    bind_alone,
    bind_items,
    by_single_items,
    compute_in,
    fuse,
    is_contraction,
    keep_in,
    keep_partial,
    keep_private,
    lanes_of,
    partial_results,
    parts,
    require,
    sample_tile,
    sketch,
    unroll_some,
    vectorise,
)
from honed.tuner.search.traces import ScheduleTrace, divisors

# The rows and columns sketches: reductions and the blocks that use their results, in one work-item. For
# softmax, normalisation and reductions: every reduction of the function runs along the same axes of its last
# block. Where these are the last axes, a work-item has whole rows, and each reduction as many partial results
# as there are lanes; where the last axis is kept, the lanes run along it and a work-item has columns.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The blocks of a function that fits, the last of them, and the axes of it that the reductions keep."""

    parts: list[BlockInfo]
    reductions: list[BlockInfo]
    final: BlockInfo
    kept: tuple[int, ...]


@sketch(110, keep=Keep.DEAR)
@sketch(120, keep=Keep.NOTHING)  # Computes exp and the like again where they are used
def rows(schedule: Schedule, limits: SketchLimits, most: int, keep: Keep) -> None:
    """Let each work-item compute whole rows."""
    work = _fitting(schedule, limits, keep)
    require(bool(work.kept) and work.kept == tuple(range(len(work.kept))))
    last = work.final.block
    if work.final.is_reduction:
        last = schedule.cache_write(last, 0, "local")
    partial = [partial_results(schedule, part, most) for part in work.reductions]
    under = bind(schedule, schedule.get_loops(last)[: len(work.kept)], limits)
    for part in reversed(work.parts):
        if part is work.final and not part.is_reduction:
            continue
        schedule.compute_at(part.block, under, preserve_unit_loops=True)
        if not part.is_reduction:
            keep_private(schedule, part.block, math.prod(part.extents[len(work.kept) :]), limits)
            vectorise(schedule, part.block, under, lanes_of(part.extents[-1], most), limits)
            continue
        keep_in(schedule, part.block, "local")
        split = partial[work.reductions.index(part)]
        if split is not None:
            keep_partial(schedule, split, under)
    vectorise(schedule, last, under, lanes_of(work.final.extents[-1], most), limits)
    for split, part in zip(partial, work.reductions, strict=True):
        for block in (split, part.block):
            if block is not None:
                schedule.decompose_reduction(block, below(schedule, block, under)[0])


_Sliced = tuple[SBlockRV, SBlockRV | None]
_SHARERS = 32  # Work-items of a row at most: some add up the partial results of all


@sketch(125)
def share_rows(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Let the work-items of a group share rows, of which each has a slice.

    Each reduces its slice in registers, and some reduce the results of all slices of a row. Not for devices
    where groups share operands.
    """
    require(by_single_items(limits))
    work = _fitting(schedule, limits, Keep.DEAR)
    final, length = work.final, work.final.extents[-1]
    require(bool(work.kept) and work.kept == tuple(range(len(final.kinds) - 1)) and not final.is_reduction)
    require(all(p.reduced == length and len(p.reducing) == 1 for p in work.reductions))
    lanes = lanes_of(length, most)
    *outer, row, columns = schedule.get_loops(final.block)
    vectors, vector = schedule.split(columns, [None, lanes])
    _, sharers = schedule.sample_perfect_tile(vectors, n=2, max_innermost_factor=_SHARERS)
    # Slices need not be contiguous, because no block keeps one
    apart = all(part.is_reduction for part in work.parts[:-1])
    across, steps = _slices(schedule, vectors, sharers, spread=apart)
    row, down, rows_ = sample_tile(schedule, row, max(limits.threads))
    schedule.reorder(*outer, row, down, across, steps, vector)
    partial = [_slice(schedule, part, lanes, sharers, spread=apart) for part in work.reductions]
    group = fuse(schedule, [*outer, row])
    stored = _in_group(schedule, work, partial, group)
    schedule.bind(group, "blockIdx.x")
    bind_items(schedule, down, across)
    vectorise(schedule, final.block, across, lanes, limits)
    for part in work.parts[:-1]:
        if not part.is_reduction:
            *loops, columns = below(schedule, part.block, group)
            across, _ = schedule.split(columns, [sharers, None])
            bind_items(schedule, fuse(schedule, loops), across)
            keep_in(schedule, part.block, "local")  # The budget knows how long a slice may be
            vectorise(schedule, part.block, across, lanes, limits)
            continue
        slices, in_vectors = partial[work.reductions.index(part)]
        for block in (part.block, *stored[part.block]):
            loops = below(schedule, block, group)
            reduced = (
                [loops.pop(0)] if block is part.block else []
            )  # TVM's rfactor makes its axis a block's first
            schedule.reorder(*loops, *reduced)
            _, *threads = schedule.split(fuse(schedule, loops), [None, rows_, sharers])
            bind_items(schedule, *threads)
        for block in (slices, *stored[slices]):
            loops = below(schedule, block, group)
            reduced = [loops.pop(-1 if in_vectors is None else 0)] if block is slices else []
            across = loops.pop(0 if block is slices else -1)
            schedule.reorder(*loops, across, *reduced)
            bind_items(schedule, fuse(schedule, loops), across)
        if in_vectors is not None:
            vector, across, *loops, steps = below(schedule, in_vectors, group)
            schedule.reorder(*loops, across, steps, vector)
            bind_items(schedule, fuse(schedule, loops), across)
            schedule.vectorize(vector)
            schedule.decompose_reduction(in_vectors, steps)
        for block in (slices, part.block):
            schedule.decompose_reduction(block, schedule.get_loops(block)[-1])


def _in_group(
    schedule: Schedule, work: _Work, partial: Sequence[_Sliced], group: LoopRV
) -> dict[SBlockRV, list[SBlockRV]]:
    """Compute all blocks but the last in a group.

    Return the blocks that store each reduction's registers there.

    All are placed before any is cut: a region must be that of all work-items, whether or not a condition
    guards it.
    """
    stored: dict[SBlockRV, list[SBlockRV]] = {}
    for part in reversed(work.parts[:-1]):
        if not part.is_reduction:
            schedule.compute_at(part.block, group, preserve_unit_loops=True)
            continue
        for block in (part.block, partial[work.reductions.index(part)][0]):
            writes = range(len(schedule.get(block).writes))
            stored[block] = [schedule.cache_write(block, n, "local") for n in writes]
            for copy in stored[block]:
                schedule.set_scope(copy, 0, "shared")
            for one in (*stored[block], block):
                schedule.compute_at(one, group, preserve_unit_loops=True)
        in_vectors = partial[work.reductions.index(part)][1]
        if in_vectors is not None:
            compute_in(schedule, in_vectors, group, "local")
    return stored


def _slices(schedule: Schedule, vectors: LoopRV, sharers: ExprRV, *, spread: bool) -> tuple[LoopRV, LoopRV]:
    """Split a row's vectors into loops over slices and in one.

    With `spread`, its vectors lie as far apart as possible.
    """
    if not spread:
        across, steps = schedule.split(vectors, [sharers, None])
        return across, steps
    steps, across = schedule.split(vectors, [None, sharers])
    return across, steps


def _slice(schedule: Schedule, part: BlockInfo, lanes: int, sharers: ExprRV, *, spread: bool) -> _Sliced:
    """Split a reduction into one that reduces each slice, and one that reduces in vectors first, if any."""
    axes = len(part.spatial)
    vectors, _ = schedule.split(schedule.get_loops(part.block)[-1], [None, lanes])
    across, _ = _slices(schedule, vectors, sharers, spread=spread)
    slices = schedule.rfactor(across, factor_axis=axes)
    if lanes == 1:
        return slices, None
    return slices, schedule.rfactor(schedule.get_loops(slices)[-1], factor_axis=axes + 1)


_SHARED_TILES = 2  # Work-items of a row, and rows of a group
_HELD = 32  # Elements of a row that a work-item holds at most
_LANES = 4  # Lanes of a vector at most: by Mesa 25 those of 8 spill, and no measure shows them faster


def shared_rows_tile(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch `share_rows` with groups of as few warps as give each work-item a slice it can hold.

    Return None where it is of another kind, or no group does. Groups of one warp need not wait.
    """
    plane = sketch.by_groups and "threadIdx.y" in str(sketch.steps)
    ours = {"RFactor", "Vectorize", "CacheWrite"} <= set(
        sketch.names
    ) and "ReverseComputeAt" not in sketch.names
    if not (plane and ours) or len(sketch.tiles) != _SHARED_TILES or sketch.lanes > _LANES:
        return None
    (first, vectors), (second, rows_) = sketch.tiles
    cuts = [
        (sharers * rows, -sharers, {first: vectors.cut(sharers), second: rows_.cut(rows)})
        for sharers in divisors(vectors.extent, vectors.most)
        for rows in divisors(rows_.extent, rows_.most)
        if vectors.extent // sharers * sketch.lanes <= _HELD and sharers * rows % WARP == 0
    ]
    return sketch.with_most(min(cuts, key=lambda cut: cut[:2])[2]) if cuts else None


@sketch(130, keep=Keep.DEAR)
@sketch(140, keep=Keep.NOTHING)
def columns(schedule: Schedule, limits: SketchLimits, most: int, keep: Keep) -> None:
    """Let a work-item compute as many whole columns as it has lanes."""
    work = _fitting(schedule, limits, keep)
    require(not work.final.is_reduction and len(work.reductions) > 1)  # The tile sketch has single reductions
    axes = len(work.final.extents)
    require(axes - 1 in work.kept and len(work.kept) < axes)
    loops = schedule.get_loops(work.final.block)
    lanes = lanes_of(work.final.extents[-1], most)
    outer, vector = schedule.split(loops[-1], [None, lanes])
    grid = [loops[n] for n in work.kept if n != axes - 1] + [outer]
    walked = [n for n in range(axes) if n not in work.kept]
    schedule.reorder(*grid, *(loops[n] for n in walked), vector)
    under = bind(schedule, grid, limits)
    schedule.vectorize(vector)
    unroll_some(schedule, loops[walked[0]], (0, limits.tail_unroll))
    for part in reversed(work.parts[:-1]):
        schedule.compute_at(part.block, under, preserve_unit_loops=True)
        if part.is_reduction:
            keep_in(schedule, part.block, "local")
        else:
            elements = math.prod(work.final.extents[n] for n in walked) * lanes
            keep_private(schedule, part.block, elements, limits)
        _column_loops(schedule, part, under, limits)


def _column_loops(schedule: Schedule, part: BlockInfo, under: LoopRV, limits: SketchLimits) -> None:
    """Put the loop over a block's lanes innermost; raises ValueError where the block has another form."""
    inner = below(schedule, part.block, under)
    if len(inner) != len(part.kinds) or not part.spatial:
        raise ValueError("a block has other loops than axes")
    laned = inner[part.spatial[-1]]
    schedule.reorder(*(loop for loop in inner if loop is not laned), laned)
    schedule.vectorize(laned)
    if part.is_reduction:
        reduce = [inner[n] for n in part.reducing]
        unroll_some(schedule, reduce[-1], (0, limits.tail_unroll))
        schedule.decompose_reduction(part.block, reduce[0])


def _fitting(schedule: Schedule, limits: SketchLimits, keep: Keep) -> _Work:
    """Return the function's blocks; raise NotApplicable where its reductions run along different axes."""
    found = parts(schedule, keep)
    reductions = [p for p in found if p.is_reduction]
    require(bool(reductions) and not any(_is_mixed(p) for p in reductions))
    require(limits.contractions or not is_contraction(schedule, found))
    axes = (axes_kept(schedule, p.block, found[-1].block) for p in reductions)
    kept = {one for one in axes if one is not None}  # Others are read only by other blocks
    if found[-1].is_reduction:
        kept = {tuple(range(found[-1].kinds.count(SPATIAL)))}
    require(len({p.kinds.count(SPATIAL) for p in reductions}) == len(kept) == 1)
    return _Work(parts=found, reductions=reductions, final=found[-1], kept=kept.pop())


def _is_mixed(what: BlockInfo) -> bool:
    """Return whether a reduction has a spatial axis after one that is reduced."""
    return REDUCE in what.kinds[: what.kinds.count(SPATIAL)]


_MOST_PARTS = 256


@sketch(170)
def whole(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Reduce everything to one element: work-items compute partial results, and one adds them up."""
    found = parts(schedule)
    require(len(found) == 1 and SPATIAL not in found[0].kinds)
    block = found[0].block
    loop = fuse(schedule, schedule.get_loops(block))
    _, inner, _ = sample_tile(schedule, loop, _MOST_PARTS)
    made = schedule.rfactor(inner, factor_axis=0)
    bind_alone(schedule, schedule.get_loops(made)[0], limits)
    schedule.decompose_reduction(made, schedule.get_loops(made)[-1])
    one = schedule.add_unit_loop(schedule.get_loops(block)[0])
    schedule.bind(one, "threadIdx.x" if limits.threads != (1,) else "blockIdx.x")


_MOST_STEPS = 32  # Vectors that one work-item moves


@sketch(160)
def stream(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Let each work-item move a few vectors, where nothing is reduced."""
    found = parts(schedule)
    require(not any(p.is_reduction for p in found))
    for part in found:
        loops = schedule.get_loops(part.block)
        if not loops:
            loops = [schedule.add_unit_loop(part.block)]
        lanes = lanes_of(part.extents[-1] if part.extents else 1, most)
        rest, vector = schedule.split(fuse(schedule, loops), [None, lanes])
        outer, steps, _ = sample_tile(schedule, rest, _MOST_STEPS)
        bind_alone(schedule, outer, limits)
        schedule.vectorize(vector)
        schedule.annotate(steps, "pragma_auto_unroll_max_step", 16)


@sketch(150)
def lines(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Let each work-group of a processor move lines of blocks of channels."""
    require(limits.groups_of_one)
    found = parts(schedule)
    require(not any(p.is_reduction or p.extents[-1:] != (most,) for p in found))
    for part in found:
        alone(schedule, part, limits, most)
