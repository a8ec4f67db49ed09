"""How launches keep a Mali's cores busy. Pure."""

from __future__ import annotations

import math

_CORES, _WARP = 4, 16


def whole_warps(group: int, items: int) -> bool:
    """Whether a group is whole warps, where a launch of so many work-items has some, as the budget asks."""
    return group % _WARP == 0 or items % _WARP != 0


def busiest(group: int, items: int) -> int:
    """Warps of the core that runs most. Groups are dealt out whole; partial warps take as long as whole."""
    return math.ceil(items // group / _CORES) * math.ceil(group / _WARP)
