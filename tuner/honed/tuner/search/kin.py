"""Schedules of kin: functions of the same kind at other sizes, in this model or in others. Pure.

What was best for one is tried first for the other, its tiles moved to the nearest that the new extents allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .decisions import Choice, Decision, Drawn, Tile


def nearest(factors: Sequence[int], extent: int, most: int) -> tuple[int, ...]:
    """Factors of `extent` as near to the given ones as its divisors allow, the innermost at most `most`.

    Nearness is that of logarithms. The outermost takes what is left: a larger function gets more tiles, not
    larger ones.
    """
    left, found = extent, list[int]()
    for place, wanted in reversed(list(enumerate(factors))[1:]):
        innermost = place == len(factors) - 1
        allowed = [d for d in divisors(left) if not innermost or d <= most]
        factor = min(allowed, key=lambda d: (abs(math.log(d / wanted)), d))
        found.append(factor)
        left //= factor
    return (left, *reversed(found))


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def adapt(kin: Drawn, to: Drawn) -> Drawn | None:
    """The decisions of `kin` on the steps of `to`; None where they are not of one form."""
    if kin.form != to.form or len(kin.decisions) != len(to.decisions):
        return None
    pairs = zip(sorted(kin.decisions.items()), sorted(to.decisions.items()), strict=True)
    changed: dict[int, Decision] = {}
    for (_, theirs), (place, ours) in pairs:
        if isinstance(theirs, Tile) and isinstance(ours, Tile):
            changed[place] = Tile(nearest(theirs.factors, ours.extent, ours.most), ours.most)
        elif isinstance(theirs, Choice) and isinstance(ours, Choice):
            changed[place] = Choice(min(theirs.index, ours.options - 1), ours.options)
        else:
            return None
    return to.with_decisions(changed)


def distance(kin: Drawn, to: Drawn) -> float:
    """How far the extents of two schedules of one form are apart: the sum of their ratios' logarithms."""
    pairs = zip(_extents(kin), _extents(to), strict=True)
    return sum(abs(math.log(theirs / ours)) for theirs, ours in pairs)


def adapted(kin: Iterable[Drawn], sketches: Sequence[Drawn], most: int) -> list[Drawn]:
    """Up to `most` schedules made of those of kin, on each sketch of its form, the nearest kin first."""
    found = [
        (distance(one, sketch), made)
        for one in kin
        for sketch in sketches
        if (made := adapt(one, sketch)) is not None
    ]
    found.sort(key=lambda pair: pair[0])
    return list({made.text(): made for _, made in found}.values())[:most]


def _extents(drawn: Drawn) -> list[int]:
    return [d.extent for _, d in sorted(drawn.decisions.items()) if isinstance(d, Tile)]
