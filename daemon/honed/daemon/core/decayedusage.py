"""Time spent that counts less the longer ago it was: arithmetic only.

Amounts decay exponentially with a half-life h: what was added t seconds ago counts 2^(-t / h) of what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

MOST = 256  # things of one model that are counted: the one that counts least goes
MAX_AWAY_HALF_LIVES = 10.0  # 1/1024: whatever the clock says, what was known still ranks

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class DecayedUsage:
    """A decaying amount of seconds, as it was at the moment `at` of a clock that the caller reads."""

    seconds: float = 0.0
    at: float = 0.0

    def value(self, now: float, half_life: float) -> float:
        """What is left of it; a clock that went back lets nothing grow."""
        return self.seconds * decay(now - self.at, half_life)

    def add(self, seconds: float, now: float, half_life: float) -> None:
        """Spend more."""
        self.settle(now, half_life)
        self.seconds += seconds

    def settle(self, now: float, half_life: float) -> None:
        """Let it decay up to `now`; from here on another half-life may hold."""
        self.seconds, self.at = self.value(now, half_life), max(self.at, now)


def decay(elapsed: float, half_life: float) -> float:
    """The share left after `elapsed` seconds, in (0, 1]."""
    return float(2.0 ** (-max(0.0, elapsed) / half_life))


def away(saved: float, now: float, half_life: float) -> float:
    """Seconds of decay to count for a service that saved at `saved` and starts at `now`, by the wall clock.

    Boards without a battery for their clock start in 1970 or in the past, and leap to the right time later:
    a span below zero counts as none, and a long one as `MAX_AWAY_HALF_LIVES`.
    """
    return min(max(0.0, now - saved), MAX_AWAY_HALF_LIVES * half_life)


def shares(microseconds: dict[str, float]) -> dict[str, float]:
    """The share that each task's time has of a profile; empty where nothing took time."""
    whole = sum(microseconds.values())
    return {task: us / whole for task, us in microseconds.items()} if whole > 0 else {}


def make_room(counted: dict[K, V], amount: Callable[[V], float]) -> None:
    """Have room for one more: where there are MOST, the one of the smallest amount goes."""
    if len(counted) >= MOST:
        del counted[min(counted, key=lambda key: amount(counted[key]))]
