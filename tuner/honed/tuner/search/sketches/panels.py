"""The panels sketch: products on processors, of any number of rows and columns.

What lies along the lanes is laid out in panels, one vector of columns wide, in a launch before: once for all
if it is constant. A work-item then reads it from end to end, where rows of a power of two would fall on the
same few lines of the cache. Rows and columns that no tile divides are rounded up (a sequence of 191 has
neither tiles nor vectors): columns and rows beyond the last are zeros, and what a tile computes there is
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from honed.tuner.lower.operands import marked
from honed.tuner.search.packing import launch_rows, pack
from honed.tuner.search.parts import (
    BlockPart,
    Keep,
    SketchLimits,
    alone,
    contraction,
    fuse,
    is_elementwise,
    reads_along,
    sample_tile,
    set_private,
    sketch,
    vectorise,
)

_READ_AS_THEY_LIE = 8  # columns: of multiples that no panels are made, but for constants
_ROWS = 4  # that rows are rounded up to, where no tile of at least so many divides them
_MOST_ROWS = 16  # of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class _PanelProduct:
    """A product by the numbers of its axes and reads."""

    main: SBlockRV
    rows: int | None  # None for a product of a vector
    columns: int
    reduced: int
    laned: int  # the read that lies along the columns
    lanes: int
    multiples: list[int]  # that each axis is rounded up to

    @property
    def rounded(self) -> bool:
        """Whether any axis is rounded up."""
        return max(self.multiples) > 1


@sketch(70)
def panels(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile a product by panels. False where the function is none, or `tile` has nothing to lay out."""
    found = contraction(schedule, Keep.DEAR) if limits.groups_of_one else None
    what = _understood(schedule, found[1][0], most) if found is not None and not found[0] else None
    if found is None or what is None:
        return False
    main, *tails = found[1]
    together = bool(tails) and is_elementwise(tails[0], main)
    copy = _copied(schedule, what)
    result = _result(schedule, what, tails[0].block if together else None)
    pack(schedule, what.main, what.laned, what.columns, what.lanes, copy)
    _tile(schedule, what, result, limits)
    launch_rows(schedule, copy, what.lanes)
    if tails and not together:
        alone(schedule, tails[0], limits, most)
    return True


def _understood(schedule: Schedule, main: BlockPart, most: int) -> _PanelProduct | None:
    """The product; None where it is none, or nothing of it is to be laid out."""
    spatial, reduced = main.spatial, main.reducing
    reads = schedule.get(main.block).reads
    laned = reads_along(schedule, main.block, spatial[-1])
    if len(reduced) != 1 or len(reads) != 2 or len(laned) != 1:
        return None
    extents, columns = main.extents, spatial[-1]
    rows = next((n for n in reversed(spatial[:-1]) if extents[n] > 1), None)
    multiples = [1] * len(extents)
    if extents[columns] % most:
        multiples[columns] = most
    if rows is not None and not any(extents[rows] % n == 0 for n in range(_ROWS, _MOST_ROWS + 1)):
        multiples[rows] = _ROWS
    odd = extents[columns] % _READ_AS_THEY_LIE != 0 or (rows is not None and multiples[rows] > 1)
    if extents[columns] < most or not (odd or _is_constant(schedule, reads[laned[0]].source)):
        return None
    return _PanelProduct(
        main=main.block,
        rows=rows,
        columns=columns,
        reduced=reduced[0],
        laned=laned[0],
        lanes=most,
        multiples=multiples,
    )


def _is_constant(schedule: Schedule, operand: ir.Var) -> bool:
    func = schedule.mod["main"]
    return any(func.params[n].same_as(operand) for n in marked(func))


def _copied(schedule: Schedule, what: _PanelProduct) -> SBlockRV:
    """The block that copies what lies along the columns, rounded up where axes are.

    The other operand is read as it lies, and chosen zeros for beyond it. Both are indexed by the axes alone
    first: TVM rounds up nothing else.
    """
    copies = [schedule.reindex(what.main, ("read", n)) for n in range(2)]
    copy, other = copies[what.laned], copies[1 - what.laned]
    if what.rounded:
        schedule.pad_einsum(what.main, what.multiples)
        along = schedule.get(what.main).reads[what.laned].source
        if not schedule.get(copy).writes[0].source.same_as(along):
            schedule.compute_inline(copy)
        for block in schedule.get_producers(what.main):
            if schedule.get(block).writes[0].source.same_as(along):
                copy = block
            elif not schedule.get(block).same_as(schedule.get(other)):
                schedule.compute_inline(block)
    schedule.compute_inline(other)
    return copy


def _result(schedule: Schedule, what: _PanelProduct, tail: SBlockRV | None) -> SBlockRV:
    """The block that writes what a tile has added up in registers: the tail, or a copy."""
    if what.rounded:
        (crop,) = schedule.get_consumers(what.main)
        if tail is not None:
            schedule.compute_inline(crop)
        result = tail or crop
    elif tail is None:
        return schedule.cache_write(what.main, 0, "local")
    else:
        result = tail
    set_private(schedule, what.main)
    return result


def _tile(schedule: Schedule, what: _PanelProduct, result: SBlockRV, limits: SketchLimits) -> None:
    """Give each work-item a tile of rows and vectors, however large that is."""
    loops = list(schedule.get_loops(what.main))
    outer = [loop for n, loop in enumerate(loops) if n not in (what.rows, what.columns, what.reduced)]
    columns, lanes = schedule.split(loops[what.columns], [None, what.lanes])
    groups, vectors, _ = sample_tile(schedule, columns, limits.vectors)
    outer.append(groups)  # work-items one after another read the same panels
    tile = [vectors]
    if what.rows is not None:
        groups, rows, _ = sample_tile(schedule, loops[what.rows], _MOST_ROWS)
        outer.append(groups)
        tile.insert(0, rows)
    terms, written, _ = sample_tile(schedule, loops[what.reduced], limits.unroll)
    schedule.reorder(*outer, terms, written, *tile, lanes)
    under = fuse(schedule, outer)
    schedule.bind(under, "blockIdx.x")
    schedule.reverse_compute_at(result, under, preserve_unit_loops=True)
    if what.multiples[what.columns] == 1:
        vectorise(schedule, result, under, what.lanes, limits)
    for loop in (written, *tile):
        schedule.unroll(loop)
    schedule.vectorize(lanes)
    schedule.decompose_reduction(what.main, terms)
