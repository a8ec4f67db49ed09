"""Rectangles of the sketch `windowed` that do well on Malis, told from extents alone. Pure.

A work-item loads the piece of the image under its pixels and a border: the larger and squarer the rectangle,
the less border. docs/measurements.md compares them with draws.
"""

from __future__ import annotations

from itertools import product

from honed.tuner.search.decisions import Drawn, divisors
from honed.tuner.search.sketches.windowed import ROWS
from honed.tuner.search.warps import best_group

_BORDER = 2  # of a window of 3 x 3


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
    group = best_group(items, threads.most)
    return sketch.with_most(
        {at_pixels: pixels.cut(long), at_rows: rows.cut(tall), at_threads: threads.cut(group, items)}
    )


def _loads(long: int, tall: int) -> float:
    """Elements of the image for each pixel."""
    return (long + _BORDER) * (tall + _BORDER) / (long * tall)
