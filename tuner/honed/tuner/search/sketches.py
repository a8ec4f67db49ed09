"""Sketches for devices without local memory worth copying into: registers, vectors and rows.

A sketch schedules a whole function and leaves numbers open (tile sizes, lanes, unrolling): they are sampled, so
that the search can change them. Three shapes of work cover what models are made of:

- tile: one work-item computes a tile of the output in registers, vectorised along the last axis of the
  output, where loads are contiguous (dense, batched matmul, convolution, pooling);
- rows: one work-item computes whole rows, each reduction in as many partial results as there are lanes
  (softmax, normalisation, reductions over the last axis);
- stream: one work-item moves a few vectors (elementwise chains, transposes, concatenation).

Vectors are as wide as the device profile says that loads pay: 64 bytes on a CPU with AVX-512, 16 on Mali.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.runtime.profile import ScheduleRules

from .blocks import REDUCE, SPATIAL, BlockInfo, blocks, info, inline_elementwise
from .traces import as_module

_VECTORS = (16, 8, 4, 2)  # OpenCL's vector lengths, but for 3
_UNROLLED_TAIL = 64  # steps
_ROW_BYTES = 16 << 10  # of one intermediate row kept in registers or private memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchLimits:
    """How far sampling may go; registers are counted in vectors of the widest load."""

    lanes: int  # of 4-byte elements in the widest load that pays
    tile: int  # of one axis of a register tile
    unroll: int  # of the innermost reduction loop
    threads: tuple[int, ...]  # work-items per work-group to choose from


def limits_for(rules: ScheduleRules) -> SketchLimits:
    """What the profile's rules mean for sketches."""
    one = rules.family == "cpu"
    return SketchLimits(
        lanes=max(1, min(16, rules.max_vector_bytes // 4)),
        tile=16 if one else 8,
        unroll=8 if one else 4,
        threads=(1,) if one else tuple(t for t in (16, 32, 64, 128, 256) if t <= rules.max_threads),
    )


def sketches(func: tirx.PrimFunc, limits: SketchLimits) -> list[Schedule]:
    """Every sketch that fits a function; none where it has blocks that the sketches do not understand."""
    found: list[Schedule] = []
    for make in (_tile, _rows, _stream):
        for lanes in _lane_choices(limits):
            schedule = Schedule(as_module(func), debug_mask="none")
            try:
                if make(schedule, limits, lanes):
                    found.append(schedule)
            except (s_tir.ScheduleError, ValueError):
                continue
    return found


def _lane_choices(limits: SketchLimits) -> tuple[int, ...]:
    narrow = limits.lanes // 2
    return (limits.lanes, narrow) if narrow > 1 else (limits.lanes,)


def _lanes(extent: int, most: int) -> int:
    """The longest OpenCL vector, at most `most` lanes, that divides `extent`."""
    return next((v for v in _VECTORS if v <= most and extent % v == 0), 1)


def _parts(schedule: Schedule) -> list[tuple[SBlockRV, BlockInfo]]:
    """The blocks left after inlining; raises ValueError where one is not understood."""
    inline_elementwise(schedule)
    found = []
    for block in blocks(schedule):
        what = info(schedule, block)
        if what is None:
            raise ValueError("an axis is neither spatial nor a reduction")
        found.append((block, what))
    return found


def _bind(schedule: Schedule, loops: Sequence[LoopRV], limits: SketchLimits) -> LoopRV:
    """Bind fused loops to the grid; returns the loop that one work-item runs under."""
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    if limits.threads == (1,):
        schedule.bind(fused, "blockIdx.x")
        return fused
    chances = [1.0 / len(limits.threads)] * len(limits.threads)
    threads = schedule.sample_categorical(list(limits.threads), chances)
    outer, inner = schedule.split(fused, [None, threads])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    return inner


def _vectorise(schedule: Schedule, block: SBlockRV, under: LoopRV, lanes: int) -> None:
    """Vectorise what a block computes per work-item by `lanes` of its innermost axis, and unroll the rest."""
    inner = _below(schedule, block, under)
    rest, vector = schedule.split(inner[-1], [None, lanes])
    schedule.vectorize(vector)
    steps = schedule.sample_categorical([0, _UNROLLED_TAIL], [0.5, 0.5])
    schedule.annotate(inner[0] if len(inner) > 1 else rest, "pragma_auto_unroll_max_step", steps)


def _below(schedule: Schedule, block: SBlockRV, under: LoopRV) -> list[LoopRV]:
    """The loops of `block` inside the loop `under`."""
    loops = list(schedule.get_loops(block))
    marker = schedule.get(under)
    at = next(n for n, loop in enumerate(loops) if schedule.get(loop).same_as(marker))
    return loops[at + 1 :]


def _tile(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    parts = _parts(schedule)
    reductions = [(b, i) for b, i in parts if i.is_reduction]
    if len(reductions) != 1 or len(parts) > 2 or not parts[0][1].is_reduction:
        return False
    block, what = reductions[0]
    loops = schedule.get_loops(block)
    spatial = [loop for loop, k in zip(loops, what.kinds, strict=True) if k == SPATIAL]
    reduce = [loop for loop, k in zip(loops, what.kinds, strict=True) if k == REDUCE]
    extents = [e for e, k in zip(what.extents, what.kinds, strict=True) if k == SPATIAL]
    if not spatial:
        return False
    lanes = _lanes(extents[-1], most)
    outer, inner = _split_spatial(schedule, spatial, extents, limits, lanes)
    steps = schedule.sample_perfect_tile(reduce[-1], n=2, max_innermost_factor=limits.unroll)
    reduce[-1], unrolled = schedule.split(reduce[-1], steps)
    schedule.reorder(*outer, *reduce, unrolled, *inner)
    under = _bind(schedule, outer, limits)
    if len(parts) == 2:
        tail = parts[1][0]
        schedule.set_scope(block, 0, "local")
    else:
        tail = schedule.cache_write(block, 0, "local")
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    _vectorise(schedule, tail, under, lanes)
    schedule.vectorize(inner[-1])
    for loop in (unrolled, *inner[:-1]):
        schedule.unroll(loop)
    schedule.decompose_reduction(block, reduce[0])
    return True


def _split_spatial(
    schedule: Schedule, spatial: list[LoopRV], extents: list[int], limits: SketchLimits, lanes: int
) -> tuple[list[LoopRV], list[LoopRV]]:
    """Split the output's axes in what the grid covers and the tile of a work-item, whose last loop is lanes."""
    outer: list[LoopRV] = []
    inner: list[LoopRV] = []
    for loop, extent in zip(spatial[:-1], extents[:-1], strict=True):
        if extent == 1:
            outer.append(loop)
            continue
        factors = schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=limits.tile)
        a, b = schedule.split(loop, factors)
        outer.append(a)
        inner.append(b)
    last, vector = schedule.split(spatial[-1], [None, lanes])
    factors = schedule.sample_perfect_tile(last, n=2, max_innermost_factor=4)
    a, b = schedule.split(last, factors)
    return [*outer, a], [*inner, b, vector]


def _rows(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    parts = _parts(schedule)
    reductions = [(b, i) for b, i in parts if i.is_reduction]
    if not reductions:
        return False
    last, final = parts[-1]
    kept = {i.kinds.count(SPATIAL) for _, i in reductions}
    if len(kept) != 1 or any(REDUCE in i.kinds[: i.kinds.count(SPATIAL)] for _, i in reductions):
        return False
    rows = kept.pop()
    if final.is_reduction:
        last = schedule.cache_write(last, 0, "local")
    loops = schedule.get_loops(last)
    if rows == 0 or rows > len(loops):
        return False
    partial = {id(b): _partial_sums(schedule, b, i, most) for b, i in reductions}
    under = _bind(schedule, schedule.get_loops(last)[:rows], limits)
    for block, what in reversed(parts):
        if block is last or (what is final and not final.is_reduction):
            continue
        schedule.compute_at(block, under, preserve_unit_loops=True)
        _keep_local(schedule, block)
        split = partial.get(id(block))
        if split is not None:
            schedule.compute_at(split, under, preserve_unit_loops=True)
            _keep_local(schedule, split)
            _lanes_innermost(schedule, split, under)
        elif not what.is_reduction:
            _vectorise(schedule, block, under, _lanes(what.extents[-1], most))
    if len(_below(schedule, last, under)):
        _vectorise(schedule, last, under, _lanes(final.extents[-1], most))
    for block, _ in reductions:
        for one in (partial.get(id(block)), block):
            if one is not None:
                schedule.decompose_reduction(one, _below(schedule, one, under)[0])
    return True


def _partial_sums(schedule: Schedule, block: SBlockRV, what: BlockInfo, most: int) -> SBlockRV | None:
    """Split the innermost reduction into lanes with a partial result each; None where its length forbids."""
    lanes = _lanes(what.extents[-1], most)
    if lanes == 1:
        return None
    _, vector = schedule.split(schedule.get_loops(block)[-1], [None, lanes])
    return schedule.rfactor(vector, factor_axis=what.kinds.count(SPATIAL))


def _lanes_innermost(schedule: Schedule, block: SBlockRV, under: LoopRV) -> None:
    """Vectorise the partial results: rfactor makes their axis a block's first."""
    lanes, *rest = _below(schedule, block, under)
    schedule.reorder(*rest, lanes)
    schedule.vectorize(lanes)


def _keep_local(schedule: Schedule, block: SBlockRV) -> None:
    """Keep what a block computes per row in private memory, where the row is small enough."""
    buffer = schedule.get(block).writes[0].source
    row = int(buffer.shape[-1]) * 4
    if row <= _ROW_BYTES:
        schedule.set_scope(block, 0, "local")


def _stream(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    parts = _parts(schedule)
    if any(i.is_reduction for _, i in parts):
        return False
    for block, what in parts:
        loops = schedule.get_loops(block)
        lanes = _lanes(what.extents[-1] if what.extents else 1, most)
        fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
        rest, vector = schedule.split(fused, [None, lanes])
        factors = schedule.sample_perfect_tile(rest, n=2, max_innermost_factor=32)
        outer, steps = schedule.split(rest, factors)
        _bind(schedule, [outer], limits)
        if lanes > 1:
            schedule.vectorize(vector)
        schedule.annotate(steps, "pragma_auto_unroll_max_step", 16)
    return True


Sketch = Callable[[Schedule, SketchLimits, int], bool]
_ = Iterator
