"""How launches keep a Mali's cores busy. Pure."""

from __future__ import annotations

import math

from .decisions import divisors

_CORES, _WARP = 4, 16
_GROUP = 64  # work-items, where the cores have as much to do


def whole_warps(group: int, items: int) -> bool:
    """Whether a group is whole warps, where a launch of so many work-items has some, as the budget asks."""
    return group % _WARP == 0 or items % _WARP != 0


def best_group(items: int, most: int) -> int:
    """Work-items of a group, of so many at most, with which the cores have as much to do."""
    groups = [n for n in divisors(items) if n <= most and whole_warps(n, items)]
    return min(groups, key=lambda n: (busiest(n, items), off_usual(n)))


def off_usual(group: int) -> float:
    """How far a group is from the usual one, where the cores have as much to do with others."""
    return abs(math.log2(group / _GROUP))


def busiest(group: int, items: int) -> int:
    """Warps of the core that runs most. Groups are dealt out whole; partial warps take as long as whole."""
    return math.ceil(items // group / _CORES) * math.ceil(group / _WARP)
