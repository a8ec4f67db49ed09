"""Tiles that do well, to begin a search with: tables instead of luck. Pure.

Of the many tiles of a product on a GPU those below were among the fastest where chosen ones were timed
(docs/measurements.md). They are moved to the nearest that the extents allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from .decisions import Decision, Drawn, Tile, divisors
from .sketches.attention import attention_tile
from .sketches.blocked import blocked_group_tile, blocked_rectangle, moved_lines
from .sketches.held import held_tile
from .sketches.pointwise import point_groups
from .sketches.windowed import window_tile

# ---- Rectangles of images and products that do well on processors, told from extents alone. Pure ----
#
# What a work-item computes of a convolution or a product is a number of vectors of accumulators: each pixel
# is one in the sketch `channels`, each piece of a row in `tile` and `panels`. As many as registers hold,
# and as few loads for them as may be. docs/measurements.md compares them with draws.

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


_AHEAD = "software_pipeline_stage"  # what sketches that load ahead are known by
_SLICED = "RFactor"
_NEAR = 1.75  # times what an image's rows or columns are wanted to be: 13 items of 13 columns instead of 8
_IMAGE_LOOPS = 6  # of a convolution at least: batch, channels, rows, columns, and what is added up


@dataclass(frozen=True, slots=True)
class _Start:
    """Of rows and of columns: what a work-item holds (columns in vectors), work-items, virtual threads.

    Rows of a convolution are its channels; the rows of its images are shared out by `image`.
    """

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    reduced: int  # steps that are copied at once
    image: tuple[int, int, int] = (1, 1, 1)


# Measured on an H100 at 4096^3, 1024^3 and smaller, the largest tile first.
_TILES = (
    _Start((8, 8, 2), (1, 16, 2), 16),
    _Start((4, 16, 2), (1, 16, 2), 8),
    _Start((4, 8, 2), (1, 16, 2), 16),
    _Start((4, 16, 2), (1, 16, 1), 16),
    _Start((4, 16, 1), (1, 16, 1), 16),
    _Start((4, 8, 1), (1, 8, 1), 16),
    _Start((4, 4, 1), (1, 8, 1), 16),
)
# Likewise for convolutions of 3x3 with 32 and 64 channels of 224 x 224: tiles of several rows of an image,
# whose windows share their elements, take a third of the time of those of one row.
_IMAGE_TILES = (
    _Start((8, 4, 1), (1, 8, 1), 16, (1, 4, 1)),
    _Start((4, 4, 2), (1, 8, 1), 16, (1, 4, 1)),
    _Start((8, 8, 1), (1, 8, 1), 16, (1, 2, 1)),
    _Start((4, 2, 2), (1, 8, 1), 16, (1, 4, 1)),
    _Start((4, 8, 1), (1, 8, 1), 16, (2, 2, 1)),
)
# Likewise at 192 x 512 x 512, by the number of slices; tiles of three rows leave no multiprocessor idle.
_SLICED_TILES = {
    4: (
        _Start((3, 8, 1), (1, 8, 1), 16),
        _Start((3, 4, 1), (1, 16, 1), 16),
        _Start((8, 4, 1), (1, 8, 1), 4),
        _Start((2, 8, 1), (1, 16, 1), 8),
        _Start((2, 4, 1), (1, 16, 1), 16),
    ),
    8: (
        _Start((6, 2, 1), (1, 8, 1), 16),
        _Start((3, 2, 1), (1, 16, 1), 16),
        _Start((2, 4, 1), (1, 16, 1), 2),
        _Start((2, 4, 1), (1, 8, 1), 4),
    ),
}

# Each knows one kind of sketch, and the one row that does well there.
_SINGLES = (
    rectangle,
    blocked_rectangle,
    blocked_group_tile,
    moved_lines,
    held_tile,
    window_tile,
    point_groups,
    attention_tile,
)


def starts(sketches: Sequence[Drawn]) -> list[Drawn]:
    """The sketches that the tables are for, with the numbers of each of their rows; none twice.

    Those are the first of a space that loads operands ahead, and all that share sums besides.
    """
    found: dict[str, Drawn] = {}
    tiled = False
    for sketch in sketches:
        for cut in (single(sketch) for single in _SINGLES):
            if cut is not None:
                found[cut.text()] = cut
        if _AHEAD not in str(sketch.steps):
            continue
        if slices := _slices(sketch):
            rows = sorted(_SLICED_TILES[slices], key=lambda start: not _fits(sketch, start))
            made = [_made(sketch, start) for start in rows]
        elif not tiled:
            tables = (*_IMAGE_TILES, *_TILES) if _of_images(sketch) else _TILES
            tiled, made = True, [_made(sketch, start) for start in tables]
        else:
            continue
        found |= {one.text(): one for one in made}
    return list(found.values())


def groups_of(start: Drawn) -> int:
    """Work-groups of one of `starts` for GPUs: what is left of the output's axes outside of all tiles."""
    axes = _axes(start, _levels(start))[:-1]
    return math.prod(axis[-1][1].factors[0] for axis in axes)


def _levels(sketch: Drawn) -> int:
    """Tiles of an axis: a work-item's, the group's, and of virtual threads, of which slices have none."""
    return 2 if _slices(sketch) else 3


def _slices(sketch: Drawn) -> int:
    """Of a sum that a group shares: the middle one of three factors, the only that is fixed; 0 for none."""
    if _SLICED not in sketch.names:
        return 0
    splits = (step[1][1:] for step in sketch.steps if step[0] == "Split")
    return next(int(factors[1]) for factors in splits if len(factors) == 3 and isinstance(factors[1], int))


def _axes(sketch: Drawn, levels: int) -> list[list[tuple[int, Tile]]]:
    """The tiles of each axis of the output, and the one of the sum, with the places of their steps."""
    tiles = sketch.tiles
    return [tiles[n : n + levels] for n in range(0, len(tiles), levels)]


def _made(sketch: Drawn, start: _Start) -> Drawn:
    """The sketch with a row's numbers."""
    changed: dict[int, Decision] = {}
    *axes, reduced = _axes(sketch, _levels(sketch))
    for axis, wanted in zip([*axes, reduced], [*_shares(sketch, start), [start.reduced]], strict=True):
        changed |= _tiled(axis, wanted)
    return sketch.with_most(changed)


def _fits(sketch: Drawn, start: _Start) -> bool:
    """Whether the output's axes are multiples of the tile, so that it is made as the row has it."""
    extents = [axis[0][1].extent for axis in _axes(sketch, _levels(sketch))[:-1]]
    return not any(n % math.prod(m) for n, m in zip(extents, _shares(sketch, start), strict=True))


def _of_images(sketch: Drawn) -> bool:
    return next(len(step[-1]) for step in sketch.steps if step[0] == "GetLoops") >= _IMAGE_LOOPS


def _shares(sketch: Drawn, start: _Start) -> list[list[int]]:
    extents = [axis[0][1].extent for axis in _axes(sketch, _levels(sketch))[:-1]]
    return _shared_out(start, extents, image=_of_images(sketch))


def _tiled(axis: Sequence[tuple[int, Tile]], wanted: Sequence[int]) -> dict[int, Decision]:
    """Factors split off one after another, each the largest divisor of what is left that is not too large."""
    extent, found = axis[0][1].extent, dict[int, Decision]()
    for (place, tile), want in zip(axis, wanted, strict=False):
        factor = _below(extent, min(want, tile.most))
        found[place] = tile.cut(factor, extent)
        extent //= factor
    return found


def _shared_out(start: _Start, extents: Sequence[int], *, image: bool) -> list[list[int]]:
    """What each axis has of a tile: the columns of an image take from its rows what they are too few for."""
    shares = [[1, 1, 1] for _ in extents]
    shares[-1] = list(start.columns)
    if len(extents) > 1 + image:
        shares[-2 - image] = list(start.rows)
    if image and len(extents) > 1:
        shares[-1] = _near(extents[-1], start.columns)
        lacking = (want // had for want, had in zip(start.columns, shares[-1], strict=True))
        wanted = [rows * max(1, times) for rows, times in zip(start.image, lacking, strict=True)]
        shares[-2] = _near(extents[-2], wanted)
    return shares


def _near(extent: int, wanted: Sequence[int]) -> list[int]:
    """Factors split off one after another, each the divisor of what is left that is nearest, by ratio."""
    found = list[int]()
    for want in wanted:
        ratios = {abs(math.log(d / want)): d for d in reversed(divisors(extent)) if d <= _NEAR * want}
        found.append(ratios[min(ratios)])
        extent //= found[-1]
    return found


def _below(extent: int, most: int) -> int:
    """The largest divisor that is not above `most`."""
    return max(d for d in divisors(extent) if d <= most)
