"""Decides which board of a farm judges which candidate, and what happens to those that return.

It is pure: no I/O; it takes events with their times, and returns actions. A candidate waits, is out with one
board under its own ticket, or is settled. A ticket counts while its board has it: answers after the board was
given up are dropped, so that a candidate assigned twice is settled once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median, median_low

_DEATHS = 2  # Boards lost while they judged a candidate, after which it is not assigned again
_ASIDE_SECONDS = 60.0  # Time until a board that is off its peers' speed is tried again
_WINDOW = 5  # Yardsticks that a board's speed rests on; one alone is sometimes off by a factor of two
_LEAST = 3  # Yardsticks needed before a board is compared with others
SET_ASIDE = 1.5  # Ratio to its peers, slower or faster, from which a board's times cannot be scaled
_BACK = 1.2  # Maximum ratio, slower or faster, at which a board is used again
TOLD = 1.1  # Change of a board's ratio that is reported


@dataclass(frozen=True, slots=True)
class Standing:
    """A board's speed: `ratio` divides its times; with `aside` they are not used."""

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
    """The yardsticks of all boards, in seconds: equal work on every board of a device.

    If it takes longer, heat or a lower clock slows the board, and its times by that ratio. Times are scaled
    to the farm's speed when the first board's was well known: the `reference`.
    """

    def __init__(self) -> None:
        self.reference: float | None = None
        self._boards: dict[str, _Clock] = {}

    def forget(self, board: str) -> None:
        """Forget a board that has left."""
        self._boards.pop(board, None)

    def note(self, board: str, yardstick: float) -> Standing:
        """Record a board's latest yardstick, and return its standing."""
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
            # Two boards that disagree have no majority: the slower one is set aside.
            clock.aside = len(peers) > 1 or now > usual
        if clock.aside and usual is not None:
            return Standing(now / usual, aside=True)
        return Standing(1.0 if self.reference is None else now / self.reference, aside=False)


def _within(ratio: float, factor: float) -> bool:
    return 1 / factor <= ratio <= factor


@dataclass(frozen=True, slots=True)
class LoadBoardTask:
    """An action: have a board load a task."""

    board: str
    task: str


@dataclass(frozen=True, slots=True)
class AssignCandidate:
    """An action: have a board judge a candidate."""

    ticket: int
    board: str
    candidate: str


@dataclass(frozen=True, slots=True)
class Settle:
    """An action: accept the verdict of a ticket; the board's times are to be divided by `ratio`."""

    ticket: int
    candidate: str
    board: str
    ratio: float


@dataclass(frozen=True, slots=True)
class BoardBlame:
    """An action: reject a candidate because `deaths` boards died while they judged it."""

    candidate: str
    deaths: int


@dataclass(frozen=True, slots=True)
class BoardNotice:
    """An action: report something about a board; `text` follows its name."""

    board: str
    text: str


Action = LoadBoardTask | AssignCandidate | Settle | BoardBlame | BoardNotice


@dataclass(slots=True)
class _Board:
    depth: int
    ready: str | None = None  # The task that it has loaded
    loading: bool = False
    tickets: list[int] = field(default_factory=list)  # Tickets, the oldest first
    away_until: float = 0.0
    reported: float = 1.0  # The ratio last reported


@dataclass(slots=True)
class _Ticket:
    board: str
    candidate: str | None  # Candidate, None if its task was replaced


class WorkList:
    """The state of all candidates and boards.

    Its methods take events, and return actions to be performed in order. `now` is in seconds of a monotonic
    clock.
    """

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.task: str | None = None
        self.boards: dict[str, _Board] = {}
        self.waiting: deque[str] = deque()
        self.tickets: dict[int, _Ticket] = {}
        self.settled: set[str] = set()  # Settled candidates of the present task
        self._deaths: dict[str, int] = {}
        self._count = 0

    @property
    def out(self) -> list[str]:
        """Candidates of the present task that boards have."""
        return [ticket.candidate for ticket in self.tickets.values() if ticket.candidate is not None]

    def take(self, task: str, now: float) -> list[Action]:
        """Have candidates of `task` judged from now on; those of the task before are dropped."""
        if task != self.task:
            self.task = task
            self.waiting.clear()
            self.settled.clear()
            self._deaths.clear()
            for ticket in self.tickets.values():
                ticket.candidate = None
        return self.tick(now)

    def want(self, candidate: str, now: float) -> list[Action]:
        """Have a candidate of the present task judged; a repeated request changes nothing."""
        if candidate not in self.settled and candidate not in [*self.waiting, *self.out]:
            self.waiting.append(candidate)
        return self.tick(now)

    def drop(self, now: float) -> list[Action]:
        """Drop the candidates that no board has: they are not to be judged."""
        self.waiting.clear()
        return self.tick(now)

    def refuse(self, ticket: int, now: float) -> list[Action]:
        """Settle the candidate of a ticket, which must not be judged and was not sent to the board."""
        given = self._take_ticket(ticket)
        if given is not None and given.candidate is not None:
            self.settled.add(given.candidate)
        return self.tick(now)

    def join(self, board: str, depth: int, now: float) -> list[Action]:
        """Add a board that accepts up to `depth` candidates at a time."""
        self.boards.setdefault(board, _Board(depth))
        return self.tick(now)

    def leave(self, name: str, now: float) -> list[Action]:
        """Remove a board that has left, or was given up; its candidates wait again.

        Its oldest candidate is the one that it was judging, and may be why it left.
        """
        self.clocks.forget(name)
        board, actions = self.boards.pop(name, None), list[Action]()
        for first, number in reversed(list(enumerate(board.tickets if board is not None else ()))):
            candidate = self.tickets.pop(number).candidate
            if candidate is None:
                continue
            if first == 0:
                deaths = self._deaths[candidate] = self._deaths.get(candidate, 0) + 1
                if deaths >= _DEATHS:
                    self.settled.add(candidate)
                    actions.append(BoardBlame(candidate, deaths))
                    continue
            self.waiting.appendleft(candidate)
        return actions + self.tick(now)

    def record_load(self, name: str, task: str | None, now: float, *, away: float = 0.0) -> list[Action]:
        """Record that a board has loaded a task, or none (None).

        The board gets no candidates for `away` seconds.
        """
        board = self.boards.get(name)
        if board is not None:
            board.loading, board.ready = False, task
            board.away_until = max(board.away_until, now + away)
        return self.tick(now)

    def accept_verdict(self, number: int, yardstick: float | None, now: float) -> list[Action]:
        """Accept a board's verdict on the candidate of a ticket, with its yardstick (seconds), if any."""
        ticket = self._take_ticket(number)
        return (list(self._settle(number, ticket, yardstick, now)) if ticket else []) + self.tick(now)

    def give_back(self, number: int, now: float, *, away: float, reload: bool = False) -> list[Action]:
        """Queue the candidate of a ticket again, which a board did not judge.

        The board gets no candidates for `away` seconds. With `reload` it has lost the task.
        """
        ticket = self._take_ticket(number)
        if ticket is not None:
            self._back(ticket, now + away)
            if reload:
                self.boards[ticket.board].ready = None
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Return the loads and assignments due by now."""
        return [*self._loads(now), *self._hand_outs(now)]

    def _take_ticket(self, number: int) -> _Ticket | None:
        """Remove a ticket, and return it; None if it did not count any more."""
        ticket = self.tickets.pop(number, None)
        if ticket is not None:
            self.boards[ticket.board].tickets.remove(number)
        return ticket

    def _back(self, ticket: _Ticket, away_until: float) -> None:
        board = self.boards[ticket.board]
        board.away_until = max(board.away_until, away_until)
        if ticket.candidate is not None:
            self.waiting.appendleft(ticket.candidate)

    def _settle(self, number: int, ticket: _Ticket, yardstick: float | None, now: float) -> Iterator[Action]:
        board, ratio = self.boards[ticket.board], 1.0
        if yardstick is not None:
            standing = self.clocks.note(ticket.board, yardstick)
            ratio = standing.ratio
            if standing.aside:
                if board.away_until <= now:
                    yield BoardNotice(
                        ticket.board,
                        f"takes {ratio:.2f} times as long as its peers for the same work; it is set aside "
                        f"for {_ASIDE_SECONDS:.0f} s, and what it had is measured by others",
                    )
                self._back(ticket, now + _ASIDE_SECONDS)
                return
            if not 1 / TOLD <= ratio / board.reported <= TOLD:
                board.reported = ratio
                yield BoardNotice(
                    ticket.board, f"takes {ratio:.2f} times the farm's usual time; its times are scaled"
                )
        if ticket.candidate is not None:
            self.settled.add(ticket.candidate)
            yield Settle(number, ticket.candidate, ticket.board, ratio)

    def _loads(self, now: float) -> Iterator[Action]:
        if self.task is None:
            return
        for name, board in self.boards.items():
            if board.ready != self.task and not board.loading and board.away_until <= now:
                board.loading = True
                yield LoadBoardTask(name, self.task)

    def _hand_outs(self, now: float) -> Iterator[Action]:
        """Assign waiting candidates to boards with room, each to the one with the fewest."""
        passed: list[str] = []
        while self.waiting:
            candidate = self.waiting.popleft()
            free = [b for b, board in self.boards.items() if self._may_take(board, candidate, now)]
            if not free:
                passed.append(candidate)
                if candidate not in self._deaths:
                    break
                continue
            name = min(free, key=lambda b: len(self.boards[b].tickets))
            self._count += 1
            self.tickets[self._count] = _Ticket(name, candidate)
            self.boards[name].tickets.append(self._count)
            yield AssignCandidate(self._count, name, candidate)
        self.waiting.extendleft(reversed(passed))

    def _may_take(self, board: _Board, candidate: str, now: float) -> bool:
        """Return whether a board may judge a candidate now.

        A candidate with which a board died is judged alone, so that the next death is due to it.
        """
        if board.ready != self.task or board.away_until > now or len(board.tickets) >= board.depth:
            return False
        if candidate in self._deaths:
            return not board.tickets
        return not any(self.tickets[number].candidate in self._deaths for number in board.tickets)
