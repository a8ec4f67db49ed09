"""Rectangles of the sketch `windowed` that do well on Malis, told from extents alone. Pure.

A work-item loads the piece of the image under its pixels and a border: the larger and squarer the rectangle,
the less border. docs/measurements.md compares them with draws.
"""

from __future__ import annotations

import math
from itertools import product

from honed.tuner.search.decisions import Choice, Decision, Drawn, Tile
from honed.tuner.search.kin import divisors
from honed.tuner.search.sketches.windowed import ROWS
from honed.tuner.search.warps import busiest, whole_warps

_BORDER = 2  # of a window of 3 x 3
_GROUP = 64  # work-items, where the cores have as much to do


def window_tile(sketch: Drawn) -> Drawn | None:
    """The sketch with its best rectangle; None where it is of another kind."""
    tiles = [(place, d) for place, d in sorted(sketch.decisions.items()) if isinstance(d, Tile)]
    names = [str(step[0]) for step in sketch.steps]
    if "threadIdx" not in str(sketch.steps) or "ComputeAt" not in names:
        return None
    if len(tiles) != 3 or tiles[1][1].most != ROWS:
        return None
    (at_pixels, pixels), (at_rows, rows), (at_threads, threads) = tiles
    splits = (step[1][1:] for step in sketch.steps if step[0] == "Split")
    lanes = next(factor for factors in splits for factor in factors if isinstance(factor, int))
    fitting = (
        (long, tall)
        for long, tall in product(divisors(pixels.extent), divisors(rows.extent))
        if tall <= ROWS and long * tall <= pixels.most
    )
    long, tall = min(fitting, key=lambda cut: (_loads(cut[0] * lanes, cut[1]), -cut[0]))
    items = threads.extent * pixels.factors[1] * rows.factors[1] // (long * tall)
    groups = [n for n in divisors(items) if n <= threads.most and whole_warps(n, items)]
    group = min(groups, key=lambda n: (busiest(n, items), abs(math.log2(n / _GROUP))))
    changed: dict[int, Decision] = {
        place: Choice(d.options - 1, d.options)  # the most steps written out
        for place, d in sketch.decisions.items()
        if isinstance(d, Choice)
    }
    changed[at_pixels] = Tile((pixels.extent // long, long), pixels.most)
    changed[at_rows] = Tile((rows.extent // tall, tall), rows.most)
    changed[at_threads] = Tile((items // group, group), threads.most)
    return sketch.with_decisions(changed)


def _loads(long: int, tall: int) -> float:
    """Elements of the image for each pixel."""
    return (long + _BORDER) * (tall + _BORDER) / (long * tall)
