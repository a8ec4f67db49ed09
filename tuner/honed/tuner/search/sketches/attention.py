"""Schedules an attention as one kernel: a product, operations along its rows of scores, a second product.

Its purpose is a softmax with scales and masks, but any chain of reductions along the rows and elementwise
blocks fits. A tile of rows of the scores is computed, kept and used in one place, so that scores never travel
through memory: `attention` keeps them with one work-item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm_ffi import structural_walk

from honed.tuner.lower.functions.fusing import FEW_ROWS
from honed.tuner.search.parts import (
    BlockInfo,
    SketchLimits,
    below,
    bind_items,
    blocks,
    compute_in,
    fuse,
    is_dear,
    keep_partial,
    lanes_of,
    last_axis,
    part_of,
    partial_results,
    require,
    sample_any,
    sample_tile,
    store_partial,
    unroll_some,
    write_out,
)
from honed.tuner.search.traces import Choice, Decision, ScheduleTrace, Tile, as_module, divisors, new_schedule

from .grouped import GroupTile


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The blocks of an attention.

    The axes of `scores` are batches, a row, a key and the summed axis; those of `product` are the same
    batches and row, a column, and the keys it is summed over. `rows` are between them, in order of execution.
    `queries` makes the queries, where it is kept as a block.
    """

    queries: BlockInfo | None
    scores: BlockInfo
    rows: list[BlockInfo]
    product: BlockInfo
    tail: BlockInfo | None
    element_bytes: int  # Bytes of a score

    @property
    def keys(self) -> int:
        """Elements of a row of the scores."""
        return self.scores.extents[-2]

    @property
    def rows_in_all(self) -> int:
        """Rows of all batches."""
        return math.prod(self.scores.extents[: self.batches + 1])

    @property
    def columns(self) -> int:
        """Elements of a row of the result."""
        return self.product.extents[-2]

    @property
    def batches(self) -> int:
        """Number of axes of batches."""
        return len(self.scores.extents) - 3

    @property
    def inner(self) -> int:
        """Number of terms of a score."""
        return self.scores.extents[-1]


def attention_of(func: tirx.PrimFunc) -> Attention | None:
    """Return the attention that an unscheduled function computes; None where it computes none."""
    try:
        return read(new_schedule(as_module(func)))
    except (ValueError, ScheduleError):
        return None


def read(schedule: Schedule, *, keeps: bool = False) -> Attention:
    """Return the attention that a function computes, after inlining elementwise blocks.

    With `keeps` the block that makes the queries is not inlined. Raises ValueError where there is none.
    """
    found = [part_of(schedule, block) for block in blocks(schedule)]
    products = [n for n, part in enumerate(found) if _is_product(schedule, part)]
    require(len(products) == 2)
    first, second = products
    asked = _query_block(schedule, found[first], found[:first]) if keeps else None
    _inline_between(schedule, [part for part in found if part is not asked], found[first], found[second])
    left = [part_of(schedule, block) for block in blocks(schedule)]
    if asked is not None:
        require(left.pop(0).name == asked.name)
    names, product = [part.name for part in left], found[second].name
    require(names[0] == found[first].name and product in names[-2:])
    at = names.index(product)
    tail = left[at + 1] if at + 1 < len(left) else None
    scores = schedule.get(left[0].block).writes[0].source
    made = Attention(
        queries=asked,
        scores=left[0],
        rows=left[1:at],
        product=left[at],
        tail=tail,
        element_bytes=int(scores.dtype.bits) // 8,
    )
    require(_has_form(made) and _keeps_rows(schedule, made))
    return made


def _query_block(schedule: Schedule, scores: BlockInfo, before: Sequence[BlockInfo]) -> BlockInfo | None:
    """Return the block that makes the queries; None where they are an input."""
    *_, _keys, inner = scores.extents
    size = math.prod(scores.extents[:-2]) * inner
    read_by = {part: schedule.get_consumers(part.block) for part in before if not part.is_reduction}
    return next(
        (
            part
            for part, blocks_ in read_by.items()
            if [str(schedule.get(one).name_hint) for one in blocks_] == [scores.name]
            and math.prod(part.extents) == size
            and part.extents[-1] == inner
        ),
        None,
    )


def _inline_between(
    schedule: Schedule, blocks: Sequence[BlockInfo], first: BlockInfo, second: BlockInfo
) -> None:
    """Inline elementwise blocks, except expensive ones between the products and the second product's operand.

    Blocks before the first product are computed again for each of its elements: raises ValueError where one
    is expensive.
    """
    between = range(blocks.index(first), blocks.index(second))
    for n, part in enumerate(blocks[:-1]):
        if part.is_reduction:
            continue
        if n in between:
            read_by = {str(schedule.get(one).name_hint) for one in schedule.get_consumers(part.block)}
            if is_dear(schedule, part.block) or second.name in read_by:
                continue
        elif is_dear(schedule, part.block):
            raise ValueError("an operand is too dear to be computed again and again")
        schedule.compute_inline(part.block)


def _reduces_last(what: BlockInfo) -> bool:
    """Return whether a block reduces along its last axis alone."""
    return what.reducing == [len(what.kinds) - 1]


def _is_product(schedule: Schedule, part: BlockInfo) -> bool:
    """Return whether a block sums, over its last axis alone, products of elements of two values."""
    if not _reduces_last(part):
        return False
    multiplied: list[tirx.Mul] = []
    structural_walk(schedule.get(part.block).body, [(tirx.Mul, multiplied.append)], order="pre")
    return any(len(_sources(one.a)) == len(_sources(one.b)) == 1 for one in multiplied[:1])


def _sources(expr: ir.Expr) -> list[ir.TensorLoad]:
    found: list[ir.TensorLoad] = []
    structural_walk(expr, [(ir.TensorLoad, found.append)], order="pre")
    return found


def _has_form(one: Attention) -> bool:
    """Return whether all blocks have the batches and rows of the scores, followed by the keys."""
    outer, keys = one.scores.extents[: one.batches + 1], one.keys
    if one.batches < 0 or not one.rows or one.rows[-1].is_reduction:
        return False
    between = [part.extents for part in one.rows]
    last = one.product
    summed = (*(last.extents[n] for n in last.spatial[:-1]), last.extents[-1])
    return (
        all(_reduces_last(part) for part in one.rows if part.is_reduction)
        and between == [(*outer, keys)] * len(between)
        and summed == (*outer, keys)
    )


def _keeps_rows(schedule: Schedule, one: Attention) -> bool:
    """Return whether each row is made from the row of equal number of the block before, in an equal batch.

    The product must read the last block made from the scores.
    """
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
    return any(region.source.same_as(made[-1]) for region in schedule.get(one.product.block).reads)


def _result_loops(schedule: Schedule, one: Attention) -> tuple[Sequence[LoopRV], int]:
    """Return the loops of the block that writes the result, and the number of the loop over rows.

    Raises ValueError where that block reads the product elsewhere than at its own place, or where its columns
    do not come last.
    """
    axes = one.batches + 2
    if one.tail is None:
        return schedule.get_loops(schedule.cache_write(one.product.block, 0, "local")), axes - 2
    tail = schedule.get(one.tail.block)
    made = schedule.get(one.product.block).writes[0].source
    (read,) = (one for one in tail.reads if one.source.same_as(made))
    found = [
        next((n for n, axis in enumerate(tail.iter_vars) if span.min.same_as(axis.var)), -1)
        for span in read.region
    ]
    if sorted(found) != list(range(axes)) or found[-1] != axes - 1:
        raise ValueError("the result is read at computed indices, or its rows are no rows")
    return schedule.get_loops(one.tail.block), found[-2]


def attention(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Give each work-item a few rows, whose scores it keeps."""
    require(limits.groups_of_one)
    one = read(schedule)
    lanes = lanes_of(one.keys, most)
    partial = [partial_results(schedule, part, most) if part.is_reduction else None for part in one.rows]
    under, summed = _write(schedule, one, limits, most)
    schedule.decompose_reduction(one.product.block, summed)
    _keep_rows(schedule, one, partial, under, lanes)
    kept = schedule.cache_write(one.scores.block, 0, "local")
    compute_in(schedule, kept, under, "local")
    *_, high, keys = below(schedule, kept, under)
    across, vectors, vector = _vectors(schedule, keys, lanes, limits)
    schedule.reorder(across, high, vectors, vector)
    write_out(schedule, [high, vectors, vector])
    scored = _multiply(schedule, one.scores.block, across, lanes, limits)
    schedule.decompose_reduction(one.scores.block, scored)


def _write(schedule: Schedule, one: Attention, limits: SketchLimits, most: int) -> tuple[LoopRV, LoopRV]:
    """Schedule the block that writes the result, and its product; return the loops of work-items and sums.

    A tile has some rows, as many as are kept, and some vectors of columns.
    """
    loops, row = _result_loops(schedule, one)
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
    """Split a loop into tiles, a sampled number of vectors per tile, and their lanes."""
    rest, vector = schedule.split(loop, [None, lanes])
    outer, vectors, _ = sample_tile(schedule, rest, limits.vectors)
    return outer, vectors, vector


def _multiply(schedule: Schedule, block: SBlockRV, at: LoopRV, lanes: int, limits: SketchLimits) -> LoopRV:
    """Compute the tile of a product under a loop, in registers; return the loop over its terms."""
    compute_in(schedule, block, at, "local")
    *_, rows, columns, summed = below(schedule, block, at)
    outer, steps, _ = sample_tile(schedule, summed, limits.unroll)
    vectors, vector = schedule.split(columns, [None, lanes])
    schedule.reorder(outer, steps, rows, vectors, vector)
    write_out(schedule, [steps, rows, vectors, vector])
    return outer


def _keep_rows(
    schedule: Schedule, one: Attention, partial: Sequence[SBlockRV | None], under: LoopRV, lanes: int
) -> None:
    """Compute all values made from the scores, row by row, in private memory."""
    at = under
    for part, split in reversed(list(zip(one.rows, partial, strict=True))):
        compute_in(schedule, part.block, at, "local")
        if part is one.rows[-1]:
            at = below(schedule, part.block, under)[-2]
        if not part.is_reduction:
            _, vector = schedule.split(below(schedule, part.block, at)[-1], [None, lanes])
            schedule.vectorize(vector)
        if split is not None:
            keep_partial(schedule, split, at)
    for part, split in zip(one.rows, partial, strict=True):
        for block in (split, part.block) if part.is_reduction else ():
            if block is not None:
                schedule.decompose_reduction(block, below(schedule, block, at)[0])


# The attention sketch for groups: the work-items of a group share a tile of rows, whose scores they keep in
# local memory. Work-items are two-dimensional: along y they share the rows, along x the keys of the scores,
# then the terms of reductions along these, then the columns of the result.

_ACROSS = (32, 16, 8, 4)  # Work-items along x, to choose from


@dataclass(frozen=True, slots=True)
class _HeadGroup:
    """The work-items of a group along both axes, and the rows of each."""

    high: ExprRV
    wide: ExprRV
    rows: ExprRV


def attention_groups(
    schedule: Schedule, by: GroupTile, limits: SketchLimits, most: int, *, copied: bool
) -> None:
    """Schedule an attention so that a group has some rows and keeps their scores.

    With `copied`, the operands of products go through local memory; without it, each work-item reads its
    operands in place.
    """
    one = read(schedule)
    loops, row = _result_loops(schedule, one)
    outer, rows, held = sample_tile(schedule, loops[row], limits.tile)
    outer, high, items = sample_tile(schedule, outer, by.threads)
    lanes = lanes_of(one.columns, most)
    group = _HeadGroup(items, _wide(schedule, one, lanes, most), held)
    across, wide, vectors, vector = _share_out(schedule, loops[-1], group, lanes, limits)
    grid = [outer if n == row else loop for n, loop in enumerate(loops[:-1])]
    schedule.reorder(*grid, across, high, wide, rows, vectors, vector)
    under = fuse(schedule, grid)
    schedule.bind(under, "blockIdx.x")
    bind_items(schedule, high, wide)
    write_out(schedule, [rows, vectors, vector])
    _multiply_in_group(schedule, one.product.block, wide, lanes, by, copied=copied)
    _share_rows(schedule, one, under, group)
    _score(schedule, one, under, group, by, limits, most, copied=copied)


def _wide(schedule: Schedule, one: Attention, lanes: int, most: int) -> ExprRV:
    """Sample the number of work-items along x: it divides the keys as well as the columns."""
    keys, columns = one.keys // lanes_of(one.keys, most), one.columns // lanes
    fitting = [n for n in _ACROSS if keys % n == columns % n == 0]
    if not fitting:
        raise ValueError("keys and columns are not divided by as many work-items")
    return sample_any(schedule, fitting)


def _share_out(
    schedule: Schedule, loop: LoopRV, group: _HeadGroup, lanes: int, limits: SketchLimits
) -> tuple[LoopRV, LoopRV, LoopRV, LoopRV]:
    """Split a loop into turns, work-items along x, a sampled number of vectors of each, and lanes."""
    rest, vector = schedule.split(loop, [None, lanes])
    steps, wide = schedule.split(rest, [None, group.wide])
    turns, vectors = schedule.sample_perfect_tile(steps, n=2, max_innermost_factor=limits.tile)
    return (*schedule.split(schedule.fuse(steps, wide), [turns, group.wide, vectors]), vector)


def _multiply_in_group(
    schedule: Schedule, block: SBlockRV, at: LoopRV, lanes: int, by: GroupTile, *, copied: bool
) -> None:
    """Compute a work-item's tile of a product in registers, under a loop."""
    compute_in(schedule, block, at, "local")
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
    """Copy a product's operands in global memory into local memory, in vectors of an open length."""
    for number, one in enumerate(schedule.get(block).reads):
        if str(one.source.scope()) == "shared":
            continue
        copy = schedule.cache_read(block, number, "shared")
        schedule.compute_at(copy, at, preserve_unit_loops=True)
        fuse(schedule, schedule.get_loops(copy)[-len(one.source.shape) :])
        schedule.annotate(copy, "meta_schedule.cooperative_fetch", sample_any(schedule, by.copied))


def _share_rows(schedule: Schedule, one: Attention, under: LoopRV, group: _HeadGroup) -> None:
    """Compute all values made from the scores in local memory, each row by the work-items along x."""
    for part in reversed(one.rows):
        compute_in(schedule, part.block, under, "shared")
        *_, rows, keys = below(schedule, part.block, under)
        high, mine = schedule.split(rows, [group.high, group.rows])
        turns, wide = schedule.split(keys, [None, group.wide])
        schedule.reorder(high, mine, turns, wide)
        bind_items(schedule, high, wide)


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
    compute_in(schedule, kept, under, "shared")
    *_, tile, keys = below(schedule, kept, under)
    lanes = lanes_of(one.keys, most)
    high, rows = schedule.split(tile, [group.high, group.rows])
    across, wide, vectors, vector = _share_out(schedule, keys, group, lanes, limits)
    schedule.reorder(across, high, wide, rows, vectors, vector)
    bind_items(schedule, high, wide)
    write_out(schedule, [rows, vectors, vector])
    _multiply_in_group(schedule, one.scores.block, wide, lanes, by, copied=copied)


# The attention sketch for few rows, as in a step of a decoder: a group has one row. Each work-item computes
# the scores of some keys, and all of them together compute the softmax. Then each sums up a vector of columns
# over a slice of the keys, and the sums of the slices are added up.


def attention_row(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Give each group one row, whose scores it keeps, of an attention of few rows whose keys lie in rows."""
    one = read(schedule, keeps=True)
    require(one.scores.extents[one.batches] <= FEW_ROWS and _lie_in_rows(schedule, one.scores))
    _result_loops(schedule, one)
    lanes = lanes_of(one.columns, most)
    items = one.columns // lanes
    least, most_threads = min(limits.threads), max(limits.threads)
    fitting = [n for n in divisors(one.keys, most_threads // items) if n * items >= least]
    if not fitting:
        raise ValueError("the keys have no slices that a group of work-items could sum up")
    slices = sample_any(schedule, fitting)
    product = one.product.block
    (result,) = schedule.get_consumers(product)
    under = _sum_slices(schedule, product, slices, lanes, limits)
    kept = schedule.cache_write(one.scores.block, 0, "local")
    for block in (product, result):
        schedule.reverse_compute_at(block, under, preserve_unit_loops=True)
    between = [kept, *(part.block for part in one.rows)]
    for block in reversed(between):
        schedule.compute_at(block, under, preserve_unit_loops=True)
    threads: dict[SBlockRV, LoopRV] = {}
    # Loops are split by numbers that do not divide them only now, because moved blocks lose the conditions.
    for block in (*between, product, result):
        _, *both = schedule.split(below(schedule, block, under)[-1], [None, slices, items])
        threads[block] = fuse(schedule, both)
        schedule.bind(threads[block], "threadIdx.x")
        if block is not result:
            schedule.set_scope(block, 0, "shared")
    summed, *_ = below(schedule, product, under)
    schedule.reorder(threads[product], summed)
    schedule.decompose_reduction(product, summed)
    _score_key(schedule, one.scores, threads[kept], limits, most)
    if one.queries is not None:
        compute_in(schedule, one.queries.block, under, "shared")
        _, *both = schedule.split(below(schedule, one.queries.block, under)[-1], [None, slices, items])
        schedule.bind(fuse(schedule, both), "threadIdx.x")


def _lie_in_rows(schedule: Schedule, scores: BlockInfo) -> bool:
    """Return whether the operands of a score lie in rows."""
    reads = range(len(schedule.get(scores.block).reads))
    return all(last_axis(schedule, scores.block, n) in (None, len(scores.kinds) - 1) for n in reads)


def _sum_slices(
    schedule: Schedule, product: SBlockRV, slices: ExprRV, lanes: int, limits: SketchLimits
) -> LoopRV:
    """Sum slices of the keys up, each by work-items of its own; return the loop of a group.

    The sums stay in local memory, for the product's block to add up.
    """
    _, part = schedule.split(schedule.get_loops(product)[-1], [None, slices])
    partial = schedule.rfactor(part, 0)
    *grid, columns, keys, part = schedule.get_loops(partial)
    items, vector = schedule.split(columns, [None, lanes])
    schedule.reorder(*grid, part, items, keys, vector)
    under, thread = fuse(schedule, grid), fuse(schedule, [part, items])
    schedule.bind(under, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    schedule.vectorize(vector)
    unroll_some(schedule, keys, (0, limits.tail_unroll))
    kept = store_partial(schedule, partial, thread)
    schedule.vectorize(below(schedule, kept, thread)[-1])
    schedule.decompose_reduction(partial, keys)
    return under


def _score_key(
    schedule: Schedule, scores: BlockInfo, thread: LoopRV, limits: SketchLimits, most: int
) -> None:
    """Compute the score of a work-item's key in registers, by vectors of its terms."""
    split = partial_results(schedule, scores, most)
    compute_in(schedule, scores.block, thread, "local")
    if split is not None:
        keep_partial(schedule, split, thread)
    for block in (split, scores.block):
        if block is not None:
            steps = below(schedule, block, thread)[0]
            unroll_some(schedule, steps, (0, limits.tail_unroll))
            schedule.decompose_reduction(block, steps)


_MOST_VECTORS = 24  # Vectors of sums on processors: the rest of 32 registers holds operands
_STEPS = 4  # Unrolled steps of a sum on processors
_HELD, _HIGH, _WIDE = 2, 8, 16  # Rows of a work-item, work-items along rows and along keys or columns
_WARP = 32
_MOST_SUMS, _LANES = 48, 4  # Sums of a work-item in a group, and lanes of their vectors
_GROUP_STEPS = 16  # Steps of a sum that a group processes at once
_KEEPS = 3  # Least number of blocks that are computed under another in sketches of attentions


def attention_tile(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch with its best tile; None where it is of another kind."""
    names, tiles = sketch.names, sketch.tiles
    if (
        names.count("DecomposeReduction") < 2
        or names.count("ComputeAt") < _KEEPS
        or "CacheWrite" not in names
    ):
        return None
    if not sketch.by_groups:
        return _of_rows(sketch, tiles) if len(tiles) == 5 else None
    if not tiles:  # A group has one row
        return sketch.with_most({})
    return _of_group(sketch, tiles) if len(tiles) == 6 else None


def _of_rows(sketch: ScheduleTrace, tiles: Sequence[tuple[int, Tile]]) -> ScheduleTrace:
    """Return the sketch with the rows and vectors that need the fewest loads for both products together."""
    rows, columns, _, keys, _ = (tile for _, tile in tiles)

    def vectors(held: int, along: Tile) -> int:
        return divisors(along.extent, min(along.most, _MOST_VECTORS // held))[-1]

    def loads(held: int) -> float:
        return sum(1 / held + 1 / vectors(held, along) for along in (columns, keys))

    held = min(divisors(rows.extent, min(rows.most, _MOST_VECTORS)), key=loads)
    wanted = (held, vectors(held, columns), _STEPS, vectors(held, keys), _STEPS)
    return sketch.with_decisions(
        {place: _tile(tile, tile.extent, want) for (place, tile), want in zip(tiles, wanted, strict=True)}
    )


def _of_group(sketch: ScheduleTrace, tiles: Sequence[tuple[int, Tile]]) -> ScheduleTrace | None:
    """Give each work-item a few rows, and a group as many work-items as share the keys and columns."""
    (at_wide, chosen), *_ = sketch.choices
    options = [int(option) for option in sketch.steps[at_wide][2][0]]
    wide = max((n for n in options if n <= _WIDE), default=options[-1])
    (at_rows, rows), (at_high, high), *products = tiles
    held, tall = _rows(rows, wide)
    changed: dict[int, Decision] = {
        at_wide: Choice(options.index(wide), len(options)),
        at_rows: _tile(rows, rows.extent, held),
        at_high: high.cut(tall, rows.extent // held),
    }
    for (at_vectors, vectors), (at_steps, steps) in zip(products[::2], products[1::2], strict=True):
        extent = vectors.extent * options[chosen.index] // wide
        changed[at_vectors] = _tile(vectors, extent, _MOST_SUMS // (held * _LANES))
        changed[at_steps] = _tile(steps, steps.extent, _GROUP_STEPS)
    return sketch.with_most(changed)


def _rows(rows: Tile, wide: int) -> tuple[int, int]:
    """Return rows of a work-item, and work-items along them: small groups get just enough for a warp."""
    for held in (divisors(rows.extent, min(_HELD, rows.most))[-1], 1):
        warps = [n for n in divisors(rows.extent // held) if n * wide >= _WARP]
        if warps:
            return held, max((n for n in warps if n <= _HIGH), default=min(warps))
    return 1, rows.extent


def _tile(tile: Tile, extent: int, want: int) -> Tile:
    """Cut the tile by the largest factor of an extent that exceeds neither `want` nor the tile's most."""
    return tile.cut(divisors(extent, min(want, tile.most))[-1], extent)
