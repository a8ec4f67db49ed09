"""Sketches of work-items that have whole rows, columns or vectors: reductions, and what reduces nothing."""

from __future__ import annotations

import math

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from honed.protocol.dataclass import dataclass
from honed.tuner.search.parts import (
    REDUCE,
    SPATIAL,
    BlockPart,
    Keep,
    SketchLimits,
    alone,
    below,
    bind,
    bind_alone,
    fuse,
    is_contraction,
    keep_partial,
    keep_private,
    kept_axes,
    lanes_of,
    partial_results,
    parts,
    sample_tile,
    set_private,
    sketch,
    unroll_some,
    vectorise,
)

# The rows and columns sketches: reductions and what is computed from them, kept with one work-item. For
# softmax, normalisation and reductions: every reduction of the function runs along the same axes of its last
# block. Where these are the last axes, a work-item has whole rows, and each reduction as many partial results
# as there are lanes; where the last axis is kept, the lanes run along it and a work-item has columns.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A function that fits: its blocks, the last of them, and which axes of that the reductions keep."""

    parts: list[BlockPart]
    reductions: list[BlockPart]
    final: BlockPart
    kept: tuple[int, ...]


@sketch(110, keep=Keep.DEAR)
@sketch(120, keep=Keep.NOTHING)  # computes exp and the like again where they are used
def rows(schedule: Schedule, limits: SketchLimits, most: int, keep: Keep) -> bool:
    """Let each work-item compute whole rows; return False where the function does not fit."""
    work = _fitting(schedule, limits, keep)
    if work is None or not work.kept or work.kept != tuple(range(len(work.kept))):
        return False
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
        set_private(schedule, part.block)
        split = partial[work.reductions.index(part)]
        if split is not None:
            keep_partial(schedule, split, under)
    vectorise(schedule, last, under, lanes_of(work.final.extents[-1], most), limits)
    for split, part in zip(partial, work.reductions, strict=True):
        for block in (split, part.block):
            if block is not None:
                schedule.decompose_reduction(block, below(schedule, block, under)[0])
    return True


@sketch(130, keep=Keep.DEAR)
@sketch(140, keep=Keep.NOTHING)
def columns(schedule: Schedule, limits: SketchLimits, most: int, keep: Keep) -> bool:
    """Let a work-item compute as many whole columns as it has lanes; return False where that does not fit."""
    work = _fitting(schedule, limits, keep)
    if work is None or work.final.is_reduction or len(work.reductions) < 2:
        return False  # the tile sketch has single reductions
    axes = len(work.final.extents)
    if axes - 1 not in work.kept or len(work.kept) == axes:
        return False
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
            set_private(schedule, part.block)
        else:
            elements = math.prod(work.final.extents[n] for n in walked) * lanes
            keep_private(schedule, part.block, elements, limits)
        _column_loops(schedule, part, under, limits)
    return True


def _column_loops(schedule: Schedule, part: BlockPart, under: LoopRV, limits: SketchLimits) -> None:
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


def _fitting(schedule: Schedule, limits: SketchLimits, keep: Keep) -> _Work | None:
    found = parts(schedule, keep)
    reductions = [p for p in found if p.is_reduction]
    if not reductions or any(_mixed(p) for p in reductions):
        return None
    if not limits.contractions and is_contraction(schedule, found):
        return None
    kept = {kept_axes(schedule, p.block, found[-1].block) for p in reductions}
    kept.discard(None)  # read by other blocks only
    if found[-1].is_reduction:
        kept = {tuple(range(found[-1].kinds.count(SPATIAL)))}
    if len({p.kinds.count(SPATIAL) for p in reductions}) != 1 or len(kept) != 1:
        return None
    axes = kept.pop()
    return None if axes is None else _Work(parts=found, reductions=reductions, final=found[-1], kept=axes)


def _mixed(what: BlockPart) -> bool:
    """Return whether a reduction has a spatial axis after one that is reduced."""
    return REDUCE in what.kinds[: what.kinds.count(SPATIAL)]


_MOST_PARTS = 256


@sketch(170)
def whole(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Reduce everything to one element: work-items make parts of it, and one adds them up."""
    found = parts(schedule)
    if len(found) != 1 or SPATIAL in found[0].kinds:
        return False
    block = found[0].block
    loop = fuse(schedule, schedule.get_loops(block))
    _, inner, _ = sample_tile(schedule, loop, _MOST_PARTS)
    made = schedule.rfactor(inner, factor_axis=0)
    bind_alone(schedule, schedule.get_loops(made)[0], limits)
    schedule.decompose_reduction(made, schedule.get_loops(made)[-1])
    one = schedule.add_unit_loop(schedule.get_loops(block)[0])
    schedule.bind(one, "threadIdx.x" if limits.threads != (1,) else "blockIdx.x")
    return True


_MOST_STEPS = 32  # vectors that one work-item moves


@sketch(160)
def stream(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Let each work-item move a few vectors; return False where anything is reduced."""
    found = parts(schedule)
    if any(p.is_reduction for p in found):
        return False
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
    return True


@sketch(150)
def lines(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Let each work-group of a processor move lines of blocks of channels; False where there are none."""
    found = parts(schedule)
    if not limits.groups_of_one or any(p.is_reduction or p.extents[-1:] != (most,) for p in found):
        return False
    for part in found:
        alone(schedule, part, limits, most)
    return True
