"""Rectangles of blocked convolutions that do well on processors, told from extents alone. Pure.

docs/measurements.md compares them with others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from honed.tuner.search.decisions import Decision, Drawn, divisors
from honed.tuner.search.sketches.blocked import MOST_VECTORS

_DEEP = 10  # accumulators, below which the processor waits for its own sums
_SUMS = 4  # steps of a sum that are written out
_FEW_GROUPS = 2  # work-groups: so many are worth half of what enough would be
_WINDOW = 3  # of a depthwise convolution, as most have
_MOST_PIXELS, _MOST_ROWS = 16, 2  # of a depthwise convolution
_TALL = 0.9  # what more rows are worth
_COPIED = 2  # a pixel that is padded is read and written

# Steps of sketches that reduce.
_COMPUTING = {"ComputeAt", "ReverseComputeAt", "DecomposeReduction", "RFactor", "CacheWrite", "SetScope"}


def blocked_rectangle(sketch: Drawn) -> Drawn | None:
    """The sketch with the rectangle that its image is best cut into; None where it is of another kind."""
    names, tiles = sketch.names, sketch.tiles
    if len(tiles) not in (3, 4) or "TransformLayout" in names or sketch.by_groups:
        return None
    (_, beside), (_, rows), (_, columns), *_ = tiles
    if not rows.most == columns.most == MOST_VECTORS:
        return None
    extents = (beside.extent, rows.extent, columns.extent)
    if names.count("DecomposeReduction") > 1:
        most, worth = MOST_VECTORS, _separable_worth
    elif beside.most == 1:
        most, worth = _MOST_PIXELS, _depthwise_worth
    else:
        most, worth = MOST_VECTORS, _worth
    steps = max(_fitting(extents, beside.most, most), key=lambda one: (worth(one, extents), one[::-1]))
    changed: dict[int, Decision] = {
        place: tile.cut(inner) for (place, tile), inner in zip(tiles, steps, strict=False)
    }
    for place, tile in tiles[len(steps) :]:
        changed[place] = tile.cut(max(n for n in divisors(tile.extent) if n <= _SUMS))
    return sketch.with_most(changed)


def moved_lines(sketch: Drawn) -> Drawn | None:
    """The sketch itself where it moves lines of vectors, of which nothing is left open; else None."""
    names = set(sketch.names)
    lines = "Vectorize" in names and not names & _COMPUTING and not sketch.by_groups
    return sketch if lines and not sketch.decisions else None


def _fitting(extents: Sequence[int], beside: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Vectors of channels, rows and columns of rectangles of at most so many vectors."""
    channels, rows, columns = map(divisors, extents)
    for one in product((n for n in channels if n <= beside), rows, columns):
        if math.prod(one) <= most:
            yield one


def _worth(steps: Sequence[int], extents: Sequence[int]) -> float:
    """Sums for each of them and each vector that is loaded: of weights, and of pixels."""
    beside, *pixels = steps
    count = math.prod(steps)
    groups = math.prod(extents) // count
    loaded = beside + math.prod(pixels)
    return count / (count + loaded) * min(1.0, count / _DEEP) * groups / (groups + _FEW_GROUPS)


def _separable_worth(steps: Sequence[int], extents: Sequence[int]) -> float:
    """That of both, for work-items that have all channels."""
    if math.prod(steps[1:]) > _MOST_PIXELS:
        return 0.0
    return _worth(steps, (steps[0], *extents[1:])) * _depthwise_worth(steps, extents)


def _depthwise_worth(steps: Sequence[int], extents: Sequence[int]) -> float:
    """Sums, with what is padded for them beside."""
    _, rows, columns = steps
    sums = rows * columns * _WINDOW**2
    padded = (rows + _WINDOW - 1) * (columns + _WINDOW - 1)
    tall = rows > _MOST_ROWS and rows != extents[1]
    return sums / (sums + _COPIED * padded) * (_TALL if tall else 1.0)
