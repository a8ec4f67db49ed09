"""Work-groups of the sketch `pointwise` that do well on Malis, told from extents alone. Pure.

The sketch settles a work-item's tile; left are its groups, which should give all cores as much to do, and the
steps of the sum that are written out, as many as may be.
"""

from __future__ import annotations

import math

from honed.tuner.search.decisions import Drawn, divisors
from honed.tuner.search.warps import busiest, off_usual, whole_warps


def point_groups(sketch: Drawn) -> Drawn | None:
    """The sketch with its best groups; None where it is of another kind."""
    if "PadEinsum" not in sketch.names or len(sketch.tiles) != 3:
        return None
    (at_down, down), (at_across, across), (at_steps, steps) = sketch.tiles
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
    return sketch.with_most(
        {at_down: down.cut(high), at_across: across.cut(wide), at_steps: steps.cut(written_out)}
    )


def _rank(group: int, wide: int, items: int) -> tuple[float, ...]:
    """By what the busiest core runs, then by how far the group is from the usual one; wide ones first."""
    return busiest(group, items), off_usual(group), -wide
