"""Rectangles of the sketch `blocked_groups` that do well on Malis, told from extents alone. Pure.

A vector of weights is loaded for all pixels of a work-item, and they are most of what it loads: so it has as
many pixels as its registers hold, and no vectors of channels beside them unless there is room.
"""

from __future__ import annotations

import math
from itertools import product

from honed.tuner.search.decisions import Decision, Drawn, divisors
from honed.tuner.search.sketches.blocked_groups import MOST_BESIDE
from honed.tuner.search.warps import best_group

_BORDER = 2  # of a window of 3 x 3
_WEIGHTS = 16  # vectors of them for each row of a window and vector of output channels
_TILES = 4
_PIXELS = (6, 12, 16)  # that registers hold: of 8 channels, of 4, and on GPUs


def blocked_group_tile(sketch: Drawn) -> Drawn | None:
    """The sketch with its best rectangle; None where it is of another kind."""
    tiles = sketch.tiles
    if len(tiles) != _TILES or "TransformLayout" in sketch.names or not sketch.by_groups:
        return None
    (_, beside), (_, rows), (_, columns), (_, threads) = tiles
    if not rows.most == columns.most in _PIXELS or beside.most not in (1, MOST_BESIDE):
        return None
    fitting = (
        steps
        for steps in product(divisors(beside.extent), divisors(rows.extent), divisors(columns.extent))
        if steps[0] <= beside.most and math.prod(steps) <= columns.most
    )
    steps = max(fitting, key=lambda one: (_worth(*one), one[2]))
    items = threads.extent * math.prod(d.factors[1] for _, d in tiles[:3]) // math.prod(steps)
    group = best_group(items, threads.most)
    changed: dict[int, Decision] = {
        place: tile.cut(inner) for (place, tile), inner in zip(tiles[:3], steps, strict=True)
    }
    changed[tiles[3][0]] = threads.cut(group, items)
    return sketch.with_decisions(changed)


def _worth(beside: int, down: int, across: int) -> float:
    """Sums for each vector that is loaded."""
    return beside * down * across / (down * (across + _BORDER) + _WEIGHTS * beside)
