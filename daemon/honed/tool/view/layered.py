"""Places for the boxes of a graph: in layers, each below what it reads (Sugiyama, Tagawa and Toda, 1981).

What one box writes runs down in one lane to all that read it, past the boxes in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from honed.protocol.dataclass import dataclass

GAP_X, GAP_Y, LANE = 26.0, 40.0, 14.0  # between boxes, between layers, from lane to lane; pixels
_SWEEPS = 6
Point = tuple[float, float]
_Cell = tuple[int, int]  # a box and its layer, or the lane below a box in a later layer


@dataclass(frozen=True, slots=True)
class BoxSize:
    """The size of a box, in pixels."""

    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Left upper corners of boxes, layer by layer, lines between them, and the size of it all, in pixels.

    `lines` are keyed by (writer, reader): from the lower edge of the one to the upper edge of the other.
    """

    corners: tuple[Point, ...]
    layers: tuple[tuple[int, ...], ...]
    lines: Mapping[tuple[int, int], tuple[Point, ...]]
    width: float
    height: float


def lay_out(sizes: Sequence[BoxSize], edges: Sequence[tuple[int, int]]) -> Layout:
    """Places for boxes; edges go from earlier boxes to later ones.

    What reads nothing stands right above its first reader.
    """
    layer = _layers(len(sizes), edges)
    rows = _rows(layer, edges)
    neighbours = _neighbours(layer, edges)
    _order(rows, neighbours)
    centres = _centres(rows, neighbours, layer, sizes)
    tops = _tops(rows, sizes)
    left = min((centres[c] - _width(c, layer, sizes) / 2 for row in rows for c in row), default=0.0)
    corners = tuple(
        (centres[(n, layer[n])] - left - size.width / 2, tops[layer[n]]) for n, size in enumerate(sizes)
    )
    lines = {edge: _line(edge, layer, centres, tops, sizes, left) for edge in dict.fromkeys(edges)}
    right = max((centres[c] + _width(c, layer, sizes) / 2 for row in rows for c in row), default=0.0)
    boxes = tuple(tuple(n for n, at in row if layer[n] == at) for row in rows)
    return Layout(corners, boxes, lines, right - left, tops[-1] - GAP_Y if sizes else 0.0)


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layer of each box: one below the lowest box that it reads."""
    reads: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for writer, reader in edges:
        reads.setdefault(reader, []).append(writer)
        readers.setdefault(writer, []).append(reader)
    found: list[int] = []
    for n in range(count):
        found.append(max((found[writer] + 1 for writer in reads.get(n, ())), default=0))
    for n in range(count):
        if n not in reads and n in readers:
            found[n] = min(found[reader] for reader in readers[n]) - 1
    return found


def _rows(layer: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[list[_Cell]]:
    """Boxes and lanes by layer, in the order in which they come."""
    last = list(layer)  # the lowest layer that a box's lane reaches
    for writer, reader in edges:
        last[writer] = max(last[writer], layer[reader] - 1)
    rows: list[list[_Cell]] = [[] for _ in range(max(layer, default=-1) + 1)]
    for n, first in enumerate(layer):
        for at in range(first, last[n] + 1):
            rows[at].append((n, at))
    return rows


def _neighbours(layer: Sequence[int], edges: Sequence[tuple[int, int]]) -> dict[_Cell, set[_Cell]]:
    """Return the cells of the layers above and below that each cell is joined with."""
    found: dict[_Cell, set[_Cell]] = {}
    for writer, reader in edges:
        path = [*((writer, at) for at in range(layer[writer], layer[reader])), (reader, layer[reader])]
        for above, below in pairwise(path):
            found.setdefault(above, set()).add(below)
            found.setdefault(below, set()).add(above)
    return found


def _order(rows: list[list[_Cell]], neighbours: Mapping[_Cell, set[_Cell]]) -> None:
    """Sort each layer by the mean place of what its cells are joined with in the layer before, to and fro."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        order = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
        for at in order:
            beside = rows[at - 1 if down else at + 1]
            place = {cell: n for n, cell in enumerate(beside)}
            now = {cell: n for n, cell in enumerate(rows[at])}
            rows[at].sort(key=lambda cell: (_mean(cell, neighbours, place, now[cell]), now[cell]))


def _mean(
    cell: _Cell, neighbours: Mapping[_Cell, set[_Cell]], place: Mapping[_Cell, float], own: float
) -> float:
    found = [place[other] for other in neighbours.get(cell, ()) if other in place]
    return sum(found) / len(found) if found else own


def _centres(
    rows: Sequence[Sequence[_Cell]],
    neighbours: Mapping[_Cell, set[_Cell]],
    layer: Sequence[int],
    sizes: Sequence[BoxSize],
) -> dict[_Cell, float]:
    """How far right the middle of each cell is: near what it is joined with, no cell over another."""
    found: dict[_Cell, float] = {}
    for row in rows:  # about one middle first, which keeps lanes straight
        packed = _apart(row, [0.0] * len(row), layer, sizes)
        found.update(zip(row, packed, strict=True))
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = [_mean(cell, neighbours, found, found[cell]) for cell in row]
            found.update(zip(row, _apart(row, wanted, layer, sizes), strict=True))
    return found


def _apart(
    row: Sequence[_Cell], wanted: Sequence[float], layer: Sequence[int], sizes: Sequence[BoxSize]
) -> list[float]:
    """Middles as near to those wanted as may be (least squares) that keep the row's order and its gaps."""
    offsets, edge = [], 0.0
    for n, cell in enumerate(row):
        half = _width(cell, layer, sizes) / 2
        edge += half + (max(_gap(row[n - 1], layer), _gap(cell, layer)) if n else 0.0)
        offsets.append(edge)
        edge += half
    blocks: list[tuple[float, int]] = []  # (mean, members) of what is left to be rising
    for want, offset in zip(wanted, offsets, strict=True):
        mean, count = want - offset, 1
        while blocks and blocks[-1][0] > mean:
            before, members = blocks.pop()
            mean = (before * members + mean * count) / (members + count)
            count += members
        blocks.append((mean, count))
    rising = [mean for mean, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(rising, offsets, strict=True)]


def _width(cell: _Cell, layer: Sequence[int], sizes: Sequence[BoxSize]) -> float:
    return sizes[cell[0]].width if layer[cell[0]] == cell[1] else 0.0


def _gap(cell: _Cell, layer: Sequence[int]) -> float:
    return GAP_X if layer[cell[0]] == cell[1] else LANE


def _tops(rows: Sequence[Sequence[_Cell]], sizes: Sequence[BoxSize]) -> list[float]:
    """Where each layer begins, and where one below the last would."""
    found, seen = [0.0], set[int]()
    for row in rows:
        boxes = [n for n, _ in row if n not in seen]
        seen.update(boxes)
        found.append(found[-1] + max(sizes[n].height for n in boxes) + GAP_Y)
    return found


def _line(
    edge: tuple[int, int],
    layer: Sequence[int],
    centres: Mapping[_Cell, float],
    tops: Sequence[float],
    sizes: Sequence[BoxSize],
    left: float,
) -> tuple[Point, ...]:
    """Down the writer's lane to the reader."""
    writer, reader = edge
    start = centres[(writer, layer[writer])] - left
    points = [(start, tops[layer[writer]] + sizes[writer].height)]
    for at in range(layer[writer] + 1, layer[reader]):
        x = centres[(writer, at)] - left
        points += [(x, tops[at]), (x, tops[at + 1] - GAP_Y)]
    return (*points, (centres[(reader, layer[reader])] - left, tops[layer[reader]]))
