"""Finds the places of the best elements of rows, in order, by merging ordered runs (Knuth, vol. 3, 5.2.4).

Each element of a merged run is found independently: a binary search along a diagonal says how many of the
elements before it come from either run (Odeh et al. 2012, "Merge path"). So a launch merges all pairs of
runs, every element costs a logarithm of their length, no element is stored to a computed place, and memory
holds one place for each element. A run is never longer than the requested number of elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir, relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T  # noqa: N812  as TVM's own code calls it

_FIRST = 16  # Elements of the first runs, whose order is found by comparing all pairs
_PLACE = "int32"
_OPAQUE = 8  # An OpPatternKind of relax.analysis: fused with nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedRuns:
    """Ordered runs, one after the other in each row: all of `length`, except that the last may be shorter."""

    rows: int
    size: int  # Elements of a row that are sorted
    length: int
    held: int  # Elements of a row that are in runs

    @property
    def count(self) -> int:
        """The number of runs of a row."""
        return -(-self.held // self.length)

    @classmethod
    def first(cls, rows: int, size: int, wanted: int) -> SortedRuns:
        """Return the best `wanted` elements of each _FIRST elements of the rows, which become runs."""
        length, given = min(_FIRST, size, wanted), min(_FIRST, size)
        others = -(-size // given) - 1
        last = min(size - others * given, length)
        return cls(rows=rows, size=size, length=length, held=others * length + last)

    def merge(self, wanted: int) -> SortedRuns:
        """Return the runs that result from merging pairs, with the best `wanted` elements of each."""
        length = min(2 * self.length, wanted)
        pairs = -(-self.count // 2)
        last = min(self.held - 2 * (pairs - 1) * self.length, length)
        return SortedRuns(rows=self.rows, size=self.size, length=length, held=(pairs - 1) * length + last)


def best_places(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return the places of the best elements along the last of two axes, as the importer requests them.

    Of equal elements the one at the lower place is better. NaN counts as the worst number.
    """
    given = call.args[0]
    rows, size = (int(extent) for extent in given.ty.shape)
    wanted, largest, dtype = int(call.attrs.k), bool(call.attrs.largest), str(given.ty.dtype)
    kept = SortedRuns.first(rows, size, wanted)
    function = _first(kept, dtype, largest=largest)
    places = _call(builder, function, [given], kept, "order_runs")
    while kept.count > 1:
        merged = kept.merge(wanted)
        function = _merge(kept, merged, dtype, largest=largest)
        places, kept = _call(builder, function, [given, places], merged, "merge_runs"), merged
    wide = relax.op.astype(places, str(call.ty.dtype))
    return builder.normalize(
        ir.Op.get("relax.astype").get_attr("FLegalize")(builder, builder.normalize(wide))
    )


def _call(
    builder: relax.BlockBuilder,
    function: tirx.PrimFunc,
    operands: list[relax.Expr],
    runs: SortedRuns,
    name: str,
) -> relax.Var:
    marked = function.with_attr("op_pattern", _OPAQUE)
    kind = relax.TensorType([runs.rows, runs.held], _PLACE)
    return builder.emit(relax.call_tir(builder.add_func(marked, name), operands, kind))


def _key(value: ir.Expr, dtype: str, *, largest: bool) -> ir.Expr:
    """Return the key by which elements are compared."""
    if "float" not in dtype:
        return value
    worst = tirx.FloatImm(dtype, -math.inf if largest else math.inf)
    return tirx.Select(tirx.isnan(value), worst, value)


def _better(one: ir.Expr, other: ir.Expr, *, largest: bool) -> ir.Expr:
    return one > other if largest else one < other


def _first(kept: SortedRuns, dtype: str, *, largest: bool) -> tirx.PrimFunc:
    """Return a function that puts each run in order by counting how many elements are before each."""
    length = min(_FIRST, kept.size)
    with IRBuilder() as made, T.prim_func(private=True, s_tir=True):
        x = T.arg("x", T.buffer((kept.rows, kept.size), dtype, layout=None))
        out = T.arg("places", T.buffer((kept.rows, kept.held), _PLACE, layout=None))
        with T.grid(kept.rows, kept.held) as (i, j), T.sblock("order_runs"):
            row, at = T.axis.spatial(kept.rows, i), T.axis.spatial(kept.held, j)
            T.reads(x[row, 0 : kept.size])
            T.writes(out[row, at])
            found = T.sblock_alloc_buffer((1,), _PLACE, scope="local", layout=None)
            before = T.sblock_alloc_buffer((1,), _PLACE, scope="local", layout=None)
            start, rank = at // kept.length * length, at % kept.length

            def key(place: ir.Expr) -> ir.Expr:
                return _key(x[row, tirx.min(start + place, kept.size - 1)], dtype, largest=largest)

            T.buffer_store(found, 0, [0])
            with T.serial(length) as one:
                T.buffer_store(before, 0, [0])
                with T.serial(length) as other:
                    ahead = _better(key(other), key(one), largest=largest)
                    same = tirx.all(key(other) == key(one), other < one)
                    there = tirx.all(start + other < kept.size, tirx.any(ahead, same))
                    T.buffer_store(before, before[0] + there.astype(_PLACE), [0])
                this = tirx.all(before[0] == rank, start + one < kept.size)
                T.buffer_store(found, tirx.Select(this, one, found[0]), [0])
            T.buffer_store(out, start + found[0], [row, at])
    return made.get()


def _merge(runs: SortedRuns, merged: SortedRuns, dtype: str, *, largest: bool) -> tirx.PrimFunc:
    """Return a function that merges each run with the next."""
    with IRBuilder() as made, T.prim_func(private=True, s_tir=True):
        x = T.arg("x", T.buffer((runs.rows, runs.size), dtype, layout=None))
        places = T.arg("places", T.buffer((runs.rows, runs.held), _PLACE, layout=None))
        out = T.arg("merged", T.buffer((runs.rows, merged.held), _PLACE, layout=None))
        with T.grid(runs.rows, merged.held) as (i, j), T.sblock("merge_runs"):
            row, at = T.axis.spatial(runs.rows, i), T.axis.spatial(merged.held, j)
            T.reads(x[row, 0 : runs.size], places[row, 0 : runs.held])
            T.writes(out[row, at])
            least = T.sblock_alloc_buffer((1,), _PLACE, scope="local", layout=None)
            most = T.sblock_alloc_buffer((1,), _PLACE, scope="local", layout=None)
            start, rank = at // merged.length * (2 * runs.length), at % merged.length
            second = start + runs.length
            first_end = tirx.min(runs.length, runs.held - start)
            second_end = tirx.max(0, tirx.min(runs.length, runs.held - second))

            def place(of: ir.Expr) -> ir.Expr:
                return places[row, tirx.max(0, tirx.min(of, runs.held - 1))]

            def key(of: ir.Expr) -> ir.Expr:
                held = tirx.max(0, tirx.min(place(of), runs.size - 1))
                return _key(x[row, held], dtype, largest=largest)

            def before(one: ir.Expr, other: ir.Expr) -> ir.Expr:
                """Return whether element `other` of the second run is better than `one` of the first."""
                return _better(key(second + other), key(start + one), largest=largest)

            # Finds how many of the elements before this one are in the first run.
            T.buffer_store(least, tirx.max(0, rank - second_end), [0])
            T.buffer_store(most, tirx.min(rank, first_end), [0])
            with T.serial(runs.length.bit_length()):
                half = (least[0] + most[0]) // 2
                with T.If(least[0] < most[0]), T.Then(), T.If(before(half, rank - 1 - half)):
                    with T.Then():
                        T.buffer_store(most, half, [0])
                    with T.Else():
                        T.buffer_store(least, half + 1, [0])
            other = rank - least[0]
            is_second = tirx.all(other < second_end, tirx.any(least[0] >= first_end, before(least[0], other)))
            T.buffer_store(out, place(tirx.Select(is_second, second + other, start + least[0])), [row, at])
    return made.get()
