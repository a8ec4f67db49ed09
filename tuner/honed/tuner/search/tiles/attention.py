"""Tiles of the attention sketches that do well, told from extents alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from honed.tuner.search.decisions import Choice, Decision, Drawn, Tile, divisors

_MOST_VECTORS = 24  # of sums on processors: what is left of 32 registers holds operands
_STEPS = 4  # of a sum on processors that are written out
_HELD, _HIGH, _WIDE = 2, 8, 16  # rows of a work-item, work-items along rows and along keys or columns
_WARP = 32
_MOST_SUMS, _LANES = 48, 4  # of a work-item in a group, in vectors of so many
_GROUP_STEPS = 16  # of a sum that a group takes at once
_KEEPS = 3  # blocks at least that are computed under another in sketches of attentions


def attention_tile(sketch: Drawn) -> Drawn | None:
    """The sketch with its best tile; None where it is of another kind."""
    names, tiles = sketch.names, sketch.tiles
    if (
        names.count("DecomposeReduction") < 2
        or names.count("ComputeAt") < _KEEPS
        or "CacheWrite" not in names
    ):
        return None
    if not sketch.by_groups:
        return _of_rows(sketch, tiles) if len(tiles) == 5 else None
    return _of_group(sketch, tiles) if len(tiles) == 6 else None


def _of_rows(sketch: Drawn, tiles: Sequence[tuple[int, Tile]]) -> Drawn:
    """The rows and vectors that load least for each product, in both products together."""
    rows, columns, _, keys, _ = (tile for _, tile in tiles)

    def vectors(held: int, along: Tile) -> int:
        return _below(along.extent, min(along.most, _MOST_VECTORS // held))

    def loads(held: int) -> float:
        return sum(1 / held + 1 / vectors(held, along) for along in (columns, keys))

    held = min((n for n in divisors(rows.extent) if n <= min(rows.most, _MOST_VECTORS)), key=loads)
    wanted = (held, vectors(held, columns), _STEPS, vectors(held, keys), _STEPS)
    return sketch.with_decisions(
        {place: _tile(tile, tile.extent, want) for (place, tile), want in zip(tiles, wanted, strict=True)}
    )


def _of_group(sketch: Drawn, tiles: Sequence[tuple[int, Tile]]) -> Drawn | None:
    """A few rows for each work-item, and as many work-items as the keys and columns are shared out to."""
    (at_wide, chosen), *_ = sketch.choices
    options = [int(option) for option in sketch.steps[at_wide][2][0]]
    wide = max((n for n in options if n <= _WIDE), default=options[-1])
    (at_rows, rows), (at_high, high), *products = tiles
    held, tall = _rows(rows, wide)
    changed: dict[int, Decision] = {
        at_wide: Choice(options.index(wide), len(options)),
        at_rows: _tile(rows, rows.extent, held),
        at_high: high.cut(tall, rows.extent // held),
    }
    for (at_vectors, vectors), (at_steps, steps) in zip(products[::2], products[1::2], strict=True):
        extent = vectors.extent * options[chosen.index] // wide
        changed[at_vectors] = _tile(vectors, extent, _MOST_SUMS // (held * _LANES))
        changed[at_steps] = _tile(steps, steps.extent, _GROUP_STEPS)
    return sketch.with_most(changed)


def _rows(rows: Tile, wide: int) -> tuple[int, int]:
    """Rows of a work-item, and work-items along them: of small groups as few as make a warp."""
    for held in (_below(rows.extent, min(_HELD, rows.most)), 1):
        warps = [n for n in divisors(rows.extent // held) if n * wide >= _WARP]
        if warps:
            return held, max((n for n in warps if n <= _HIGH), default=min(warps))
    return 1, rows.extent


def _tile(tile: Tile, extent: int, want: int) -> Tile:
    """The largest factor of an extent that is neither above what is wanted nor above the most."""
    return tile.cut(_below(extent, min(want, tile.most)), extent)


def _below(extent: int, most: int) -> int:
    return max(n for n in divisors(extent) if n <= max(1, most))
