"""Work-groups of the sketch `pointwise` that do well on Malis, told from extents alone. Pure.

The sketch settles a work-item's tile; left are its groups, which should give all cores as much to do, and the
steps of the sum that are written out, as many as may be.
"""

from __future__ import annotations

import math

from honed.tuner.search.decisions import Choice, Decision, Drawn, Tile
from honed.tuner.search.kin import divisors
from honed.tuner.search.warps import busiest, whole_warps

_GROUP = 64  # work-items, where the cores have as much to do


def point_groups(sketch: Drawn) -> Drawn | None:
    """The sketch with its best groups; None where it is of another kind."""
    tiles = [(place, d) for place, d in sorted(sketch.decisions.items()) if isinstance(d, Tile)]
    if not any(step[0] == "PadEinsum" for step in sketch.steps) or len(tiles) != 3:
        return None
    (at_down, down), (at_across, across), (at_steps, steps) = tiles
    items = down.extent * across.extent
    groups = [
        (high, wide)
        for high in divisors(down.extent)
        for wide in divisors(across.extent)
        if high * wide <= across.most and whole_warps(high * wide, items)
    ]
    if not groups:
        return None
    high, wide = min(groups, key=lambda group: _rank(math.prod(group), group[1], items))
    written_out = max(n for n in divisors(steps.extent) if n <= steps.most)
    changed: dict[int, Decision] = {
        place: Choice(d.options - 1, d.options)
        for place, d in sketch.decisions.items()
        if isinstance(d, Choice)
    }
    changed[at_down] = Tile((down.extent // high, high), down.most)
    changed[at_across] = Tile((across.extent // wide, wide), across.most)
    changed[at_steps] = Tile((steps.extent // written_out, written_out), steps.most)
    return sketch.with_decisions(changed)


def _rank(group: int, wide: int, items: int) -> tuple[float, ...]:
    """By what the busiest core runs, then by how far the group is from the usual one; wide ones first."""
    return busiest(group, items), abs(math.log2(group / _GROUP)), -wide
