"""Rectangles of images and products that do well on processors, told from extents alone. Pure.

What a work-item computes of a convolution or a product is a number of vectors of accumulators: each pixel
is one in the sketch `channels`, each piece of a row in `tile` and `panels`. As many as registers hold, and as
few loads for them as may be. docs/measurements.md compares them with draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from .decisions import Drawn, divisors

_MOST = 16  # vectors of pixels: with more, compilers keep some in memory
_LONG = 8  # pixels of a row, from which the lanes are taken apart by whole vectors
_SHORT = 0.9  # what shorter ones are worth
_FEW = 7  # vectors: fewer leave the processor waiting for its own sums
_MOST_PIECES = 24  # vectors of pieces of rows
_LANES = 8  # of vectors of AVX2, which has 16 registers of them; AVX-512 and NEON have 32
_MOST_PANELS = {False: 16, True: 12}  # vectors of a product, by whether registers are so few
_MOST_ROWS = 6  # of a product: each is broadcast on its own


def rectangle(sketch: Drawn) -> Drawn | None:
    """The sketch with the rectangle that its image is best cut into; None where it is of another kind."""
    if sketch.by_groups:
        return None
    laid_out = sketch.names.count("TransformLayout")
    extents = [tile.extent for _, tile in sketch.tiles]
    if laid_out >= 2:
        return _of_channels(sketch, extents)
    if laid_out == 1:
        return _of_panels(sketch, extents)
    if laid_out == 0 and len(extents) == 4 and extents[-1] == 1:  # channels, rows, columns; no window
        return _of_pieces(sketch, extents)
    return None


def _of_channels(sketch: Drawn, extents: Sequence[int]) -> Drawn:
    beside, *pixels = extents
    fitting = (steps for steps in product(*map(divisors, pixels)) if math.prod(steps) <= _MOST)
    steps = max(fitting, key=lambda steps: (_worth(steps), steps[-1]))
    vectors = 2 if math.prod(steps) <= _FEW and beside % 2 == 0 else 1
    return _with_steps(sketch, [vectors, *steps])


def _worth(steps: Sequence[int]) -> float:
    """Sums for each vector loaded: of weights once, of pixels as many as there are."""
    count = math.prod(steps)
    return count / (count + 2) * (1.0 if steps[-1] >= _LONG else _SHORT)


def _of_pieces(sketch: Drawn, extents: Sequence[int]) -> Drawn:
    """About as many channels as pieces: a weight is loaded for all pieces, a piece for all channels."""
    allowed = [
        [d for d in divisors(e) if d <= t.most] for e, (_, t) in zip(extents, sketch.tiles, strict=True)
    ]
    fitting = (steps for steps in product(*allowed) if math.prod(steps) <= _MOST_PIECES)
    steps = max(fitting, key=lambda s: (math.prod(s) / (s[0] + s[1] * s[2]), s[2]))
    return _with_steps(sketch, steps)


def _of_panels(sketch: Drawn, extents: Sequence[int]) -> Drawn:
    """About as many rows as vectors: each vector is loaded for all rows, each row for all vectors."""
    panels, *rows, terms = extents
    most = _MOST_PANELS[sketch.lanes == _LANES]
    allowed = [[d for d in divisors(panels) if d <= sketch.tiles[0][1].most]]
    allowed += [[d for d in divisors(extent) if d <= _MOST_ROWS] for extent in rows]
    fitting = (steps for steps in product(*allowed) if math.prod(steps) <= most)
    steps = max(fitting, key=lambda s: (math.prod(s) / sum(s), s[0]))
    written = next(n for n in (4, 2, 1) if terms % n == 0)
    return _with_steps(sketch, [*steps, written])


def _with_steps(sketch: Drawn, steps: Sequence[int]) -> Drawn:
    """The sketch with so many steps of each extent in a rectangle."""
    return sketch.with_most(
        {place: tile.cut(inner) for (place, tile), inner in zip(sketch.tiles, steps, strict=True)}
    )
