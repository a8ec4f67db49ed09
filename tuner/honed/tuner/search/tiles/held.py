"""Tiles of the sketch `held` that do well on Malis, told from extents and type alone. Pure.

A step of the sum loads one element for each row of the tile and one for each column, and multiplies each with
each: the squarer and larger the tile, the fewer loads. How large it may be before its kernel spills is data,
compiled by Mesa for products of many shapes (docs/measurements.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from honed.tuner.search.decisions import Decision, Drawn, Tile, divisors
from honed.tuner.search.warps import busiest, off_usual, whole_warps

_WIDE = 8  # work-items along the lanes, where the cores have as much to do
_VECTOR_BYTES = 16  # that `held` loads of an operand at most


@dataclass(frozen=True, slots=True)
class _Room:
    """Accumulators that registers hold, and the steps of the sum that rows are then loaded for at once."""

    element_bytes: int
    lanes: int  # of a vector
    terms: float  # of the sum at most: halves are added up twice from 257 on (lower.sums.LONGEST)
    accumulators: int
    steps: int


_ROOMS = (
    _Room(2, 8, 256, 40, 4),
    _Room(2, 8, math.inf, 32, 4),
    _Room(2, 4, 256, 32, 4),
    _Room(2, 4, math.inf, 20, 2),
    _Room(4, 4, math.inf, 40, 1),
    _Room(4, 4, math.inf, 32, 2),
)


@dataclass(frozen=True, slots=True)
class _Product:
    """The tiles of a sketch with the places of their steps, and the lanes of its vectors."""

    others: list[tuple[int, Tile]]
    rows: tuple[int, Tile]
    high: tuple[int, Tile]
    vectors: tuple[int, Tile]
    wide: tuple[int, Tile]
    steps: tuple[int, Tile]
    lanes: int

    @property
    def rooms(self) -> list[_Room]:
        """Those of its type and vectors."""
        element_bytes, terms = _VECTOR_BYTES // self.steps[1].most, self.steps[1].extent
        kind = element_bytes, self.lanes
        return [one for one in _ROOMS if (one.element_bytes, one.lanes) == kind and terms <= one.terms]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows and vectors of a work-item's tile, work-items along both, and steps of the sum."""

    rows: int
    high: int
    vectors: int
    wide: int
    steps: int


def held_tile(sketch: Drawn) -> Drawn | None:
    """The sketch with its best tile; None where it is of another kind, or has no rows or short vectors."""
    found = _product(sketch)
    if found is None:
        return None
    cut = min(_cuts(found), key=lambda cut: _rank(found, cut), default=None)
    return None if cut is None else sketch.with_most(_decisions(found, cut))


def loads_of(start: Drawn) -> int:
    """What the busiest core loads for a step of the sum with a tile of `held_tile`; of other tiles 0."""
    found = _product(start)
    if found is None:
        return 0
    tiles = (found.rows, found.high, found.vectors, found.wide, found.steps)
    return _loads(found, _Cut(*(tile.factors[-1] for _, tile in tiles)))


def _product(sketch: Drawn) -> _Product | None:
    text, tiles = str(sketch.steps), sketch.tiles
    packs = "TransformLayout" in text and "TransformBlockLayout" not in text
    if "threadIdx.y" not in text or packs or len(tiles) < 5:
        return None
    rows, high, vectors, wide, steps = tiles[-5:]
    if high[1].most != wide[1].most:
        return None  # the sum has several axes
    return _Product(tiles[:-5], rows, high, vectors, wide, steps, sketch.lanes)


def _cuts(product: _Product) -> Iterator[_Cut]:
    """All tiles that there is room for, in groups of whole warps."""
    rows, vectors = product.rows[1], product.vectors[1]
    for room in product.rooms:
        steps = math.gcd(product.steps[1].extent, room.steps)
        for tall in (n for n in divisors(rows.extent) if n <= rows.most):
            most = min(vectors.most, room.accumulators // (tall * product.lanes))
            for long in (n for n in divisors(vectors.extent) if n <= most):
                for high, wide in _groups(product, rows.extent // tall, vectors.extent // long):
                    yield _Cut(tall, high, long, wide, steps)


def _groups(product: _Product, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Work-items along both axes: whole warps, where the launch has some, as the budget asks."""
    items = rows * columns * _beside(product)
    for high in divisors(rows):
        for wide in divisors(columns):
            if high * wide <= product.wide[1].most and whole_warps(high * wide, items):
                yield high, wide


def _beside(product: _Product) -> int:
    """Products that are computed at once."""
    return math.prod(tile.extent for _, tile in product.others)


def _rank(product: _Product, cut: _Cut) -> tuple[float, ...]:
    """By loads, then by how far the group is from the usual one; rows are loaded in long vectors."""
    beside = abs(math.log2(cut.wide / _WIDE)), off_usual(cut.high * cut.wide)
    return _loads(product, cut), -cut.steps, *beside, cut.rows


def _loads(product: _Product, cut: _Cut) -> int:
    """What the busiest core loads for a step of the sum."""
    items = (product.rows[1].extent // cut.rows) * (product.vectors[1].extent // cut.vectors)
    warps = busiest(cut.high * cut.wide, _beside(product) * items)
    return warps * (cut.rows + cut.vectors * product.lanes)


def _decisions(product: _Product, cut: _Cut) -> dict[int, Decision]:
    rows, columns = product.rows[1].extent, product.vectors[1].extent
    wanted = (
        *((tile, tile[1].extent, 1) for tile in product.others),
        (product.rows, rows, cut.rows),
        (product.high, rows // cut.rows, cut.high),
        (product.vectors, columns, cut.vectors),
        (product.wide, columns // cut.vectors, cut.wide),
        (product.steps, product.steps[1].extent, cut.steps),
    )
    return {place: tile.cut(inner, extent) for (place, tile), extent, inner in wanted}
