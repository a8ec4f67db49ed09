"""Attentions in one kernel: a product, what is computed along the rows of its scores, a product of those.

A softmax with scales and masks in it is what is meant, but any chain of reductions along the rows and
elementwise blocks will do. A tile of rows of the scores is computed, kept and used in one place, so that
scores never travel through memory: `attention` keeps them with one work-item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm_ffi import structural_walk

from honed.tuner.search.blocks import BlockInfo, blocks, is_dear
from honed.tuner.search.parts import (
    BlockPart,
    SketchLimits,
    below,
    fuse,
    keep_partial,
    lanes_of,
    part_of,
    partial_results,
    sample_tile,
    set_private,
    write_out,
)
from honed.tuner.search.traces import as_module, unscheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The blocks of an attention that is read so far.

    The axes of `scores` are batches, a row, a key and what is summed; those of `product` are the same batches
    and row, a column, and the keys it is summed over. `rows` are between them, in order of execution.
    """

    scores: BlockPart
    rows: list[BlockPart]
    product: BlockPart
    tail: BlockPart | None
    element_bytes: int  # of a score

    @property
    def keys(self) -> int:
        """Elements of a row of the scores."""
        return self.scores.info.extents[-2]

    @property
    def rows_in_all(self) -> int:
        """Of all batches."""
        return math.prod(self.scores.info.extents[: self.batches + 1])

    @property
    def columns(self) -> int:
        """Elements of a row of the result."""
        return self.product.info.extents[-2]

    @property
    def batches(self) -> int:
        """How many axes of batches there are."""
        return len(self.scores.info.extents) - 3

    @property
    def inner(self) -> int:
        """Elements that a score is summed over."""
        return self.scores.info.extents[-1]


def attention_of(func: tirx.PrimFunc) -> Attention | None:
    """The attention that an unscheduled function is; None where it is none."""
    try:
        return read(unscheduled(as_module(func)))
    except (ValueError, ScheduleError):
        return None


def read(schedule: Schedule) -> Attention | None:
    """The attention that a function is, with elementwise blocks inlined; None where it is none.

    Raises ValueError likewise, where blocks are of other kinds.
    """
    found = [part_of(schedule, block) for block in blocks(schedule)]
    products = [n for n, part in enumerate(found) if _is_product(schedule, part)]
    if len(products) != 2:
        return None
    first, second = products
    _inline_between(schedule, found, first, second)
    left = [part_of(schedule, block) for block in blocks(schedule)]
    names, product = [part.info.name for part in left], found[second].info.name
    if names[0] != found[first].info.name or product not in names[-2:]:
        return None
    at = names.index(product)
    tail = left[at + 1] if at + 1 < len(left) else None
    scores = schedule.get(left[0].block).writes[0].source
    made = Attention(
        scores=left[0],
        rows=left[1:at],
        product=left[at],
        tail=tail,
        element_bytes=int(scores.dtype.bits) // 8,
    )
    return made if _has_form(made) and _keeps_rows(schedule, made) else None


def _inline_between(schedule: Schedule, found: Sequence[BlockPart], first: int, second: int) -> None:
    """Inline what is elementwise, but for what is dear between the products and what the second is made of.

    Before the first product it is computed for each of its elements again: raises ValueError where that is
    dear.
    """
    for n, part in enumerate(found[:-1]):
        if part.info.is_reduction:
            continue
        if first < n < second:
            read_by = {str(schedule.get(one).name_hint) for one in schedule.get_consumers(part.block)}
            if is_dear(schedule, part.block) or found[second].info.name in read_by:
                continue
        elif is_dear(schedule, part.block):
            raise ValueError("an operand is too dear to be computed again and again")
        schedule.compute_inline(part.block)


def _reduces_last(what: BlockInfo) -> bool:
    """Whether a block reduces along its last axis alone."""
    return what.reducing == [len(what.kinds) - 1]


def _is_product(schedule: Schedule, part: BlockPart) -> bool:
    """Whether a block sums, over its last axis alone, products of elements of two values."""
    if not _reduces_last(part.info):
        return False
    multiplied: list[tirx.Mul] = []
    structural_walk(schedule.get(part.block).body, [(tirx.Mul, multiplied.append)], order="pre")
    return any(len(_sources(one.a)) == len(_sources(one.b)) == 1 for one in multiplied[:1])


def _sources(expr: ir.Expr) -> list[ir.TensorLoad]:
    found: list[ir.TensorLoad] = []
    structural_walk(expr, [(ir.TensorLoad, found.append)], order="pre")
    return found


def _has_form(one: Attention) -> bool:
    """Whether all blocks have the batches and rows of the scores, and the keys behind them."""
    outer, keys = one.scores.info.extents[: one.batches + 1], one.keys
    if one.batches < 0 or not one.rows or one.rows[-1].info.is_reduction:
        return False
    between = [part.info.extents for part in one.rows]
    last = one.product.info
    summed = (*(last.extents[n] for n in last.spatial[:-1]), last.extents[-1])
    return (
        all(_reduces_last(part.info) for part in one.rows if part.info.is_reduction)
        and between == [(*outer, keys)] * len(between)
        and summed == (*outer, keys)
    )


def _keeps_rows(schedule: Schedule, one: Attention) -> bool:
    """Whether each row is made of the same row before it, and of the same batch."""
    made = [schedule.get(part.block).writes[0].source for part in (one.scores, *one.rows)]
    for part in (*one.rows, one.product):
        block = schedule.get(part.block)
        axes = [axis.var for axis in block.iter_vars]
        own = [*axes[: one.batches + 1], axes[-1]]
        for region in block.reads:
            if not any(region.source.same_as(buffer) for buffer in made):
                continue
            spans = zip(region.source.shape, region.region, own, strict=False)
            if not all(int(extent) == 1 or span.min.same_as(axis) for extent, span, axis in spans):
                return False
    return True


def written_axes(schedule: Schedule, one: Attention) -> list[int]:
    """By each axis of the product, but for the sum, the axis of the block that writes its result.

    Raises ValueError where that reads it elsewhere than at its own place, or its columns do not come last.
    """
    axes = one.batches + 2
    if one.tail is None:
        return list(range(axes))
    tail = schedule.get(one.tail.block)
    made = schedule.get(one.product.block).writes[0].source
    (read,) = (one for one in tail.reads if one.source.same_as(made))
    found = [
        next((n for n, axis in enumerate(tail.iter_vars) if span.min.same_as(axis.var)), -1)
        for span in read.region
    ]
    if sorted(found) != list(range(axes)) or found[-1] != axes - 1:
        raise ValueError("the result is read at computed indices, or its rows are no rows")
    return found


def attention(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """One work-item has a few rows, and keeps their scores. False where the function is no attention."""
    one = read(schedule) if limits.groups_of_one else None
    if one is None:
        return False
    lanes = lanes_of(one.keys, most)
    partial = [partial_results(schedule, part, most) if part.info.is_reduction else None for part in one.rows]
    under, summed = _write(schedule, one, limits, most)
    schedule.decompose_reduction(one.product.block, summed)
    _keep_rows(schedule, one, partial, under, lanes)
    kept = schedule.cache_write(one.scores.block, 0, "local")
    schedule.compute_at(kept, under, preserve_unit_loops=True)
    set_private(schedule, kept)
    *_, high, keys = below(schedule, kept, under)
    across, vectors, vector = _vectors(schedule, keys, lanes, limits)
    schedule.reorder(across, high, vectors, vector)
    write_out(schedule, [high, vectors, vector])
    scored = _multiply(schedule, one.scores.block, across, lanes, limits)
    schedule.decompose_reduction(one.scores.block, scored)
    return True


def _write(schedule: Schedule, one: Attention, limits: SketchLimits, most: int) -> tuple[LoopRV, LoopRV]:
    """Schedule what writes the result, and the product it is made from; the loops of work-items and sums.

    A tile has some rows, as many as are kept, and some vectors of columns.
    """
    places = written_axes(schedule, one)
    last = one.tail.block if one.tail else schedule.cache_write(one.product.block, 0, "local")
    loops, row = schedule.get_loops(last), places[-2]
    room = limits.row_bytes // (one.keys * one.element_bytes)
    if not room:
        raise ValueError("a row is too long to be kept by one work-item")
    outer, rows, _ = sample_tile(schedule, loops[row], min(limits.tile, room))
    lanes = lanes_of(one.columns, most)
    across, vectors, vector = _vectors(schedule, loops[-1], lanes, limits)
    grid = [outer if n == row else loop for n, loop in enumerate(loops[:-1])]
    schedule.reorder(*grid, across, rows, vectors, vector)
    under = fuse(schedule, grid)
    schedule.bind(under, "blockIdx.x")
    write_out(schedule, [rows, vectors, vector])
    return under, _multiply(schedule, one.product.block, across, lanes, limits)


def _vectors(
    schedule: Schedule, loop: LoopRV, lanes: int, limits: SketchLimits
) -> tuple[LoopRV, LoopRV, LoopRV]:
    """Split a loop into tiles, the vectors of a tile, how many is left open, and their lanes."""
    rest, vector = schedule.split(loop, [None, lanes])
    outer, vectors, _ = sample_tile(schedule, rest, limits.vectors)
    return outer, vectors, vector


def _multiply(schedule: Schedule, block: SBlockRV, at: LoopRV, lanes: int, limits: SketchLimits) -> LoopRV:
    """Compute the tile of a product under a loop, in registers; returns the loop over what is summed."""
    schedule.compute_at(block, at, preserve_unit_loops=True)
    set_private(schedule, block)
    *_, rows, columns, summed = below(schedule, block, at)
    outer, steps, _ = sample_tile(schedule, summed, limits.unroll)
    vectors, vector = schedule.split(columns, [None, lanes])
    schedule.reorder(outer, steps, rows, vectors, vector)
    write_out(schedule, [steps, rows, vectors, vector])
    return outer


def _keep_rows(
    schedule: Schedule, one: Attention, partial: Sequence[SBlockRV | None], under: LoopRV, lanes: int
) -> None:
    """Compute all that is made of the scores, row by row, in private memory."""
    at = under
    for part, split in reversed(list(zip(one.rows, partial, strict=True))):
        schedule.compute_at(part.block, at, preserve_unit_loops=True)
        set_private(schedule, part.block)
        if part is one.rows[-1]:
            at = below(schedule, part.block, under)[-2]
        if not part.info.is_reduction:
            _, vector = schedule.split(below(schedule, part.block, at)[-1], [None, lanes])
            schedule.vectorize(vector)
        if split is not None:
            keep_partial(schedule, split, at)
    for part, split in zip(one.rows, partial, strict=True):
        for block in (split, part.block) if part.info.is_reduction else ():
            if block is not None:
                schedule.decompose_reduction(block, below(schedule, block, at)[0])
