"""How fast each board of a farm runs beside the others, by the yardstick that each times beside candidates.

Pure. The yardstick is the same work on every board of a device: where it takes longer, the board is slowed
by heat, or has a lower clock, and its times are longer by as much.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_low

_WINDOW = 5  # yardsticks that a board's speed rests on; one alone is off by a factor of two now and then
_LEAST = 3  # of them before a board is compared with others
SET_ASIDE = 1.5  # times as slow as its peers, or as fast: how a candidate's time follows is not known then
_BACK = 1.2  # times as slow as its peers at most, or as fast, to be taken back
TOLD = 1.1  # by which a board's ratio must change to be worth a word


@dataclass(frozen=True, slots=True)
class Standing:
    """`ratio` is what the board's times are to be divided by; with `aside` they are not to be used."""

    ratio: float
    aside: bool


@dataclass(slots=True)
class _Clock:
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    aside: bool = False

    @property
    def compared(self) -> bool:
        return len(self.latest) >= _LEAST and not self.aside


class Clocks:
    """The yardsticks of all boards, in seconds.

    Times are brought to the speed that the farm had when a board was first known well: the `reference`.
    """

    def __init__(self) -> None:
        self.reference: float | None = None
        self._boards: dict[str, _Clock] = {}

    def forget(self, board: str) -> None:
        """A board has left."""
        self._boards.pop(board, None)

    def note(self, board: str, yardstick: float) -> Standing:
        """What a board's latest yardstick makes of it."""
        clock = self._boards.setdefault(board, _Clock())
        peers = [median(c.latest) for b, c in self._boards.items() if b != board and c.compared]
        usual = median_low(peers) if peers else None
        if clock.aside:
            if usual is not None and not _within(yardstick / usual, _BACK):
                return Standing(yardstick / usual, aside=True)
            clock.aside = False
            clock.latest.clear()
        clock.latest.append(yardstick)
        if self.reference is None and len(clock.latest) == _WINDOW:
            self.reference = median_low([*peers, median(clock.latest)])
        now = median(clock.latest)
        if usual is not None and clock.compared and not _within(now / usual, SET_ASIDE):
            # Of two that disagree the slower is the one that is held back.
            clock.aside = len(peers) > 1 or now > usual
        if clock.aside and usual is not None:
            return Standing(now / usual, aside=True)
        return Standing(1.0 if self.reference is None else now / self.reference, aside=False)


def _within(ratio: float, factor: float) -> bool:
    return 1 / factor <= ratio <= factor
