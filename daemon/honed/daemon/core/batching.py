"""When requests for a model are run together: a gathering that knows delays, deadlines and users; no clock.

Requests that agree in all but their first dimension may be run as one. They wait for each other until enough
are there, the first has waited for the model's delay, or one would miss its deadline; while a batch runs, the
next gathers. All times are seconds on one monotonic clock that the caller passes in.
"""

from __future__ import annotations

from dataclasses import dataclass

_MARGIN_RUNS = 2.0  # that a request is begun before its deadline
_FORGET = 0.8  # of what is known of a run's time, with each that comes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMember:
    """A request that may be run with others."""

    number: int
    user: int
    rows: int  # of its first dimension
    arrived: float
    deadline: float


class Gathering:
    """Requests of one kind. Users take turns in filling a batch, each with its own in their order."""

    def __init__(self, most: int, delay: float) -> None:
        """At most so many rows are run together, and none waits longer than `delay` while nothing runs."""
        self._most = most
        self._delay = delay
        self._waiting: list[BatchMember] = []
        self._turns: dict[int, int] = {}  # of users: when each had its last
        self._turn = 0
        self._running = 0
        self._seconds = 0.0  # of a run, lately

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._running

    def arrived(self, member: BatchMember) -> None:
        """A request waits from now on."""
        self._waiting.append(member)

    def left(self, number: int) -> None:
        """Nobody waits for a request any more."""
        self._waiting = [member for member in self._waiting if member.number != number]

    def ended(self, seconds: float) -> None:
        """A batch that `due` gave has run."""
        self._running -= 1
        self._seconds = seconds if not self._seconds else _FORGET * self._seconds + (1 - _FORGET) * seconds

    def due(self, now: float) -> list[tuple[BatchMember, ...]]:
        """The batches that are to be run now."""
        batches = []
        while self._waiting and now >= self._time():
            batches.append(self._filled())
            self._running += 1
        return batches

    def next_time(self) -> float | None:
        """When `due` is to be asked again if nothing happens before; None: nothing is waited for."""
        return self._time() if self._waiting and self._time() < float("inf") else None

    def _time(self) -> float:
        """When the next batch is due: the past where it is full."""
        if sum(member.rows for member in self._waiting) >= self._most:
            return float("-inf")
        urgent = min(member.deadline for member in self._waiting) - _MARGIN_RUNS * self._seconds
        if self._running:
            return urgent
        return min(urgent, min(member.arrived for member in self._waiting) + self._delay)

    def _filled(self) -> tuple[BatchMember, ...]:
        """Take one of each user in turn, while there is room; the first is taken whatever its size."""
        chosen: list[BatchMember] = []
        rows = 0
        while self._waiting:
            member = min(self._waiting, key=lambda m: (self._turns.get(m.user, 0), m.arrived, m.number))
            if chosen and rows + member.rows > self._most:
                break
            self._waiting.remove(member)
            self._turn += 1
            self._turns[member.user] = self._turn
            chosen.append(member)
            rows += member.rows
        if not self._waiting:
            self._turns.clear()
        return tuple(chosen)
