"""Rectangles of the sketch `windowed` that do well on Malis, told from extents alone. Pure.

A work-item loads the piece of the image under its pixels and a border: the larger and squarer the rectangle,
the less border. docs/measurements.md compares them with draws.
"""

from __future__ import annotations

import math
from itertools import product

from honed.tuner.search.decisions import Drawn, divisors
from honed.tuner.search.sketches.windowed import ROWS
from honed.tuner.search.warps import busiest, whole_warps

_BORDER = 2  # of a window of 3 x 3
_GROUP = 64  # work-items, where the cores have as much to do


def window_tile(sketch: Drawn) -> Drawn | None:
    """The sketch with its best rectangle; None where it is of another kind."""
    tiles = sketch.tiles
    if not sketch.by_groups or "ComputeAt" not in sketch.names:
        return None
    if len(tiles) != 3 or tiles[1][1].most != ROWS:
        return None
    (at_pixels, pixels), (at_rows, rows), (at_threads, threads) = tiles
    lanes = sketch.lanes
    fitting = (
        (long, tall)
        for long, tall in product(divisors(pixels.extent), divisors(rows.extent))
        if tall <= ROWS and long * tall <= pixels.most
    )
    long, tall = min(fitting, key=lambda cut: (_loads(cut[0] * lanes, cut[1]), -cut[0]))
    items = threads.extent * pixels.factors[1] * rows.factors[1] // (long * tall)
    groups = [n for n in divisors(items) if n <= threads.most and whole_warps(n, items)]
    group = min(groups, key=lambda n: (busiest(n, items), abs(math.log2(n / _GROUP))))
    return sketch.with_most(
        {at_pixels: pixels.cut(long), at_rows: rows.cut(tall), at_threads: threads.cut(group, items)}
    )


def _loads(long: int, tall: int) -> float:
    """Elements of the image for each pixel."""
    return (long + _BORDER) * (tall + _BORDER) / (long * tall)
