"""Schedules products of one row in one kernel: with the norm that makes the row, and two of a gated layer.

Such products occur in a decoder's step of one token. Each group computes the whole row, which is little
beside the weights of its columns, and keeps it in local memory. Its work-items share the columns along x and
the terms of their sums along y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from honed.tuner.search.parts import (
    LINE,
    BlockInfo,
    SketchLimits,
    axes_kept,
    below,
    bind_items,
    blocks,
    compute_in,
    fuse,
    is_dear,
    part_of,
    reads_along,
    require,
    sample_tile,
    sum_steps,
    unroll_some,
)
from honed.tuner.search.traces import ScheduleTrace, as_module, divisors, new_schedule

# A product, with the block that sums the terms of each step of its sum first, if there is one.
_Product = tuple[BlockInfo | None, BlockInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRow:
    """The blocks of a function of products of one row.

    `sums` are reductions to one element, from which `row`, the products' operand, is made; without them the
    row is an input. Each of `products` has its columns last among its axes, and one axis that it is summed
    over.
    """

    sums: list[BlockInfo]
    row: BlockInfo | None
    products: list[_Product]
    tail: BlockInfo | None

    @property
    def columns(self) -> int:
        """Elements of the result."""
        return self.products[0][1].extents[-2]

    @property
    def terms(self) -> int:
        """Elements of the row."""
        steps, whole = self.products[0]
        return whole.extents[-1] * (1 if steps is None else steps.extents[-1])


def one_row_of(func: tirx.PrimFunc) -> OneRow | None:
    """Return the products of one row that an unscheduled function computes; None where it computes others."""
    try:
        return read(new_schedule(as_module(func)))
    except (ValueError, ScheduleError):
        return None


def read(schedule: Schedule) -> OneRow:
    """Return the function's products of one row, after inlining elementwise blocks.

    Raises ValueError where it has none; a product alone does not count.
    """
    found = [part_of(schedule, block) for block in blocks(schedule)]
    single = {part.name for part in found if part.is_reduction and _elements(part) == 1}
    row: BlockInfo | None = None
    for part in found[:-1]:
        if part.is_reduction:
            continue
        readers = [part_of(schedule, one) for one in schedule.get_consumers(part.block)]
        read_by = [one for one in readers if one.is_reduction and one.name not in single]
        if read_by and single and _is_row(part):
            require(row is None)
            row = part
            continue
        require(not (read_by and is_dear(schedule, part.block)))
        schedule.compute_inline(part.block)
    left = [part_of(schedule, block) for block in blocks(schedule)]
    tail = None if left[-1].is_reduction else left[-1]
    sums = [part for part in left if part.name in single]
    reductions = [part for part in left if part.is_reduction and part.name not in single]
    expected = [*sums, *([row] if row else []), *reductions, *([tail] if tail else [])]
    require([one.name for one in expected] == [one.name for one in left] and bool(sums) == bool(row))
    products = _products(schedule, reductions)
    require(len(products) == _MOST_PRODUCTS or (len(products) == 1 and row is not None))
    require(
        tail is None
        or all(_columns_read(schedule, whole, tail) == tail.spatial[-1:] for _, whole in products)
    )
    made = OneRow(sums=sums, row=row, products=products, tail=tail)
    require(_has_form(made))
    return made


_MOST_PRODUCTS = 2


def _elements(part: BlockInfo) -> int:
    """Return how many elements a block makes."""
    return math.prod(part.extents[n] for n in part.spatial)


def _is_row(part: BlockInfo) -> bool:
    """Return whether a block's only axis of more than one element is its last."""
    return math.prod(part.extents[:-1]) == 1


def _columns_read(schedule: Schedule, product: BlockInfo, tail: BlockInfo) -> list[int]:
    """Return the axis of a tail that reads the columns of a product, in a list; empty where none does."""
    return list(axes_kept(schedule, product.block, tail.block) or ())[-1:]


def _products(schedule: Schedule, reductions: Sequence[BlockInfo]) -> list[_Product]:
    """Return the products among the reductions; none where only some of them sum steps first."""
    steps: dict[str, BlockInfo] = {}  # Summing blocks by the name of their reader
    products: list[_Product] = []
    for part in reductions:
        read_by = [part_of(schedule, one) for one in schedule.get_consumers(part.block)]
        reader = next((one.name for one in read_by if one.is_reduction), "")
        if reader:
            steps[reader] = part
        else:
            products.append((steps.get(part.name), part))
    return products if len(steps) in (0, len(products)) else []


def _has_form(one: OneRow) -> bool:
    """Return whether all products have equal sums and columns, and the tail their shape."""
    whole = [part for _, part in one.products]
    first = whole[0]
    last = len(first.kinds) - 1
    if last < 1 or any(part.extents != first.extents or part.reducing != [last] for part in whole):
        return False
    if math.prod(first.extents[:-2]) != 1 or one.columns == 1:
        return False
    for sums, part in one.products:
        *rows, columns, steps = part.extents
        if sums is not None and (sums.reducing != [last + 1] or sums.extents[:-1] != (*rows, steps, columns)):
            return False
    return one.tail is None or one.tail.extents == first.extents[:-1]


_SECTOR = 32  # Bytes that most devices read at once
_LINES = 2  # Lines of each row of weights that a group reads at most
_SLICES, _THREADS = 64, 256  # Slices and work-items of a group at most
_FEW_SLICES = 2  # Slices where work-items wait long for each other


def one_row(schedule: Schedule, limits: SketchLimits) -> None:
    """Have each group compute the row and some columns."""
    one = read(schedule)
    first = one.products[0][1]
    line, most = (LINE, _FEW_SLICES) if limits.contractions else (_SECTOR, _SLICES)
    width = _LINES * line // _element_bytes(schedule, one.products[0])
    slices: ExprRV | None = None
    # Sums of slices, of products whose steps are sums of their own
    slice_sums: dict[BlockInfo, SBlockRV] = {}
    for sums, part in one.products:
        steps = schedule.get_loops(part.block)[-1]
        if slices is None:
            _, slices = schedule.sample_perfect_tile(steps, n=2, max_innermost_factor=most)
        if sums is not None:
            _, slice_ = schedule.split(steps, [None, slices])
            slice_sums[part] = schedule.rfactor(slice_, 0)
    result = one.tail.block if one.tail is not None else schedule.cache_write(first.block, 0, "shared")
    *ones, columns = schedule.get_loops(result)
    group, _, items = sample_tile(schedule, columns, width)
    under = fuse(schedule, [*ones, group])
    schedule.bind(under, "blockIdx.x")
    kept = {part: schedule.cache_write(block, 0, "local") for part, block in slice_sums.items()}
    _keep(schedule, [*kept.values(), *(part.block for _, part in one.products)], under)
    for sums, part in one.products:
        if sums is not None:
            slice_, *_, column = below(schedule, kept[part], under)
            bind_items(schedule, slice_, column)
            schedule.compute_at(slice_sums[part], column, preserve_unit_loops=True)
            mine = below(schedule, slice_sums[part], column)[-1]
            sum_steps(schedule, sums, slice_sums[part], mine, limits)
            slice_, *_, column = below(schedule, part.block, under)
        else:
            *_, column, steps = below(schedule, part.block, under)
            mine, slice_ = schedule.split(steps, [None, slices])
            unroll_some(schedule, mine, (0, limits.tail_unroll))
            schedule.reorder(column, slice_, mine)
        schedule.reorder(column, slice_)
        bind_items(schedule, slice_, column)
    shared = [part.block for part in (*one.sums, *([one.row] if one.row is not None else []))]
    _keep(schedule, shared, under)
    for block in (*shared, result):
        _, *threads = schedule.split(below(schedule, block, under)[-1], [None, slices, items])
        bind_items(schedule, *threads)


def _keep(schedule: Schedule, blocks: Sequence[SBlockRV], under: LoopRV) -> None:
    """Compute blocks, of which later ones may read earlier ones, in local memory under a group's loop."""
    for block in reversed(blocks):
        compute_in(schedule, block, under, "shared")


def _element_bytes(schedule: Schedule, product: _Product) -> int:
    """Return the bytes of the largest element that a product reads along its columns."""
    part = product[0] or product[1]
    read = reads_along(schedule, part.block, part.spatial[-1])
    return max(int(schedule.get(part.block).reads[n].source.dtype.bits) for n in read) // 8


_TILES = range(2, 5)  # Number of tiles: of slices and columns, and of the terms of each step
_MANY_GROUPS = 1024  # Groups, beyond which computing the row in each takes longer than a launch


def shares_row(sketch: ScheduleTrace) -> bool:
    """Return whether groups compute a row that they share."""
    others = {"ReverseComputeAt", "Vectorize"}
    plane = "threadIdx.y" in str(sketch.steps) and others.isdisjoint(sketch.names)
    return plane and len(sketch.tiles) in _TILES


def one_row_tile(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch with groups that read whole lines.

    Return None where it is of another kind, or has too many columns.
    """
    if not shares_row(sketch):
        return None
    (first, steps), (second, columns), *terms = sketch.tiles
    wide = [n for n in divisors(columns.extent, columns.most) if n * _LINES >= columns.most]
    items = next((n for n in wide if columns.extent // n <= _MANY_GROUPS), None)
    if items is None:
        return None
    slices = divisors(steps.extent, min(steps.most, _THREADS // items))[-1]
    written = {place: tile.cut(divisors(tile.extent, tile.most)[-1]) for place, tile in terms}
    return sketch.with_most({first: steps.cut(slices), second: columns.cut(items)} | written)
