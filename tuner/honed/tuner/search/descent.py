"""Coordinate descent: schedules that differ from the best in a single decision. Pure.

TVM has the like as Droplet search; here neighbours go through the same checks and measurements as all else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from .decisions import Choice, Decision, Drawn, Tile
from .kin import divisors


def neighbours(drawn: Drawn) -> list[Drawn]:
    """All schedules one step away in one decision: tiles at adjacent divisors, choices beside theirs."""
    return [
        drawn.with_decisions({place: other})
        for place, decision in sorted(drawn.decisions.items())
        for other in _beside(decision)
    ]


def _beside(decision: Decision) -> Iterator[Decision]:
    if isinstance(decision, Choice):
        for index in (decision.index - 1, decision.index + 1):
            if 0 <= index < decision.options:
                yield Choice(index, decision.options)
        return
    for smaller, larger in permutations(range(len(decision.factors)), 2):
        moved = _moved(decision, smaller, larger)
        if moved is not None:
            yield moved


def _moved(tile: Tile, smaller: int, larger: int) -> Tile | None:
    """One factor at its next larger divisor of what both make together, the other at what is left."""
    together = tile.factors[smaller] * tile.factors[larger]
    following = next((d for d in divisors(together) if d > tile.factors[larger]), None)
    if following is None or (larger == len(tile.factors) - 1 and following > tile.most):
        return None
    factors = list(tile.factors)
    factors[larger], factors[smaller] = following, together // following
    return Tile(tuple(factors), tile.most)
