"""Rectangles of pixels that do well on processors, by the extents of an image alone. Pure.

Each pixel of a rectangle is a vector of accumulators. The sketch whose tiles these are is `channels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from .decisions import Drawn, Tile
from .kin import divisors

_MOST = 16  # vectors: with more, compilers keep some in memory
_LONG = 8  # pixels of a row, from which the lanes are taken apart by whole vectors
_SHORT = 0.9  # what shorter ones are worth
_FEW = 7  # vectors: fewer leave the processor waiting for its own sums
_IN_TURN = 4  # rectangles that a work-item computes one after another, at most


def is_of_channels(sketch: Drawn) -> bool:
    """Whether a sketch is `channels`: it lays out weights and results, and has no work-items but one a group."""
    laid_out = sum(str(step[0]) == "TransformLayout" for step in sketch.steps)
    return laid_out >= 2 and "threadIdx" not in str(sketch.steps)


def rectangle(sketch: Drawn) -> Drawn:
    """The sketch with the rectangle that its image is best cut into."""
    tiles = [(place, tile) for place, tile in sorted(sketch.decisions.items()) if isinstance(tile, Tile)]
    (_, beside), *pixels, (_, turn) = tiles
    steps = _best([tile.extent for _, tile in pixels])
    vectors = 2 if math.prod(steps) <= _FEW and beside.extent % 2 == 0 else 1
    places = pixels[-1][1].extent // steps[-1]
    in_turn = max(d for d in divisors(places) if d <= _IN_TURN)
    extents = [beside.extent, *(tile.extent for _, tile in pixels), places]
    return sketch.with_decisions(
        {
            place: Tile((extent // inner, inner), tile.most)
            for (place, tile), extent, inner in zip(tiles, extents, (vectors, *steps, in_turn), strict=True)
        }
    )


def _best(extents: Sequence[int]) -> tuple[int, ...]:
    """The steps along each axis of the best rectangle."""
    fitting = (steps for steps in product(*map(divisors, extents)) if math.prod(steps) <= _MOST)
    return max(fitting, key=lambda steps: (_worth(steps), steps[-1]))


def _worth(steps: Sequence[int]) -> float:
    """Sums for each vector loaded: of weights once, of pixels as many as there are."""
    count = math.prod(steps)
    return count / (count + 2) * (1.0 if steps[-1] >= _LONG else _SHORT)
