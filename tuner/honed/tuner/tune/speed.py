"""How fast the device runs at the moment, beside when it was first seen: the yardstick over candidates."""

from __future__ import annotations

from collections import deque
from statistics import median

# Throttling lasts far longer than a candidate; one yardstick alone is off by up to a factor of two now and
# then, when something else ran beside it.
_WINDOW = 5


class Speed:
    """Takes the yardsticks measured beside candidates; seconds."""

    def __init__(self, reference: float | None) -> None:
        """`reference` is the yardstick at the device's reference speed; None: not known yet."""
        self.reference = reference
        self._latest: deque[float] = deque(maxlen=_WINDOW)

    @property
    def known(self) -> int:
        """How many yardsticks `now` rests on."""
        return len(self._latest)

    @property
    def now(self) -> float | None:
        """The yardstick of late; None before the first."""
        return median(self._latest) if self._latest else None

    @property
    def ratio(self) -> float:
        """What times are to be divided by to have them at reference speed; above 1 the device is slowed."""
        now = self.now
        return 1.0 if now is None or self.reference is None else now / self.reference

    def note(self, yardstick: float) -> None:
        """Take in the latest."""
        self._latest.append(yardstick)
