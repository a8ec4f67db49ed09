"""The simulation: boards pull by their own clocks, push after their night, and share one line to the hub.

Pure but for a seeded random generator: the same figures for the same arguments.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from random import Random

from honed.hub import schedule
from honed.hub.looking import LOOKS
from honed.hub.memory import HubMemory

from .sizes import Http, Sizes

HOUR = 3600.0
DAY = 24 * HOUR


class Reading(Enum):
    """How a pull finds out what is new."""

    WHOLE = "every index, each time"
    CONDITIONAL = "every index, if changed"
    LISTED = "the overview, what it says changed, and some others in turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is simulated. Times are seconds, from midnight of the first day."""

    boards: int = 1000
    pushers: int = 1  # boards that learn something in the night
    hours: float = 6.0  # between two pulls
    away: float = 0.02  # share of boards that are off for the first day
    line_mbit: float = 100.0  # a second, out of the hub
    round_trip_s: float = 0.03
    noting_s: float = 0.1  # that a push takes from reading the overview to having written it
    reading: Reading = Reading.LISTED
    together: bool = False  # all boards come on at the same moment, as after a power cut
    apart: bool = True  # they wait then as honed-hub does; else each pulls at once
    down_h: float = 0.0  # hours that the hub is away, from when all have pushed
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the hub had to do from the first push until every board had all, and in a day on average."""

    requests: int  # in all
    requests_a_day: float  # of all boards
    bytes_a_day: float  # out of the hub
    board_bytes_a_day: float  # of one board, both ways
    most_a_second: int  # requests begun
    half_s: float  # until half of the boards had all that was pushed, from the last push
    on_s: float  # until all had that were on
    all_s: float  # until all had
    longest_pull_s: float
    lost: int  # notes in the overview that another push wrote over


@dataclass(slots=True)
class _Board:
    """`looked`: when so many indexes were asked for last, in the order of their turns, from `turn` on."""

    chance: float
    turn: int
    looked: deque[tuple[float, int]]
    seen: int = 0  # pushes that it has the records of, of those in the overview
    found: set[int] = field(default_factory=set)  # others
    had: bool = False  # all, at some time
    memory: HubMemory = field(default_factory=HubMemory)


@dataclass(slots=True)
class _Pushes:
    """When boards pushed: what the overview tells of, since when; and by their numbers whose it does not."""

    noted: list[float]
    lost: dict[int, float]
    last: float

    @classmethod
    def of(cls, fleet: Fleet, rng: Random) -> _Pushes:
        times = sorted(rng.uniform(5 * HOUR, 7 * HOUR) for _ in range(fleet.pushers))
        width = fleet.noting_s if fleet.reading is Reading.LISTED else 0.0
        over = {time for time, later in pairwise(times) if later - time < width}
        numbers = rng.sample(range(fleet.boards), len(over))
        lost = dict(zip(numbers, sorted(over), strict=True))
        return cls([time for time in times if time not in over], lost, times[-1])

    def new(self, board: _Board, now: float, turns: range, boards: int) -> int:
        """How many a board finds now, which asks for these indexes in their turn; it has them then."""
        seen = bisect_right(self.noted, now)
        found = {
            number
            for number, time in self.lost.items()
            if time <= now and (number - turns.start) % boards < len(turns)
        }
        changed = seen - board.seen + len(found - board.found)  # once more where it is noted again: few
        board.seen, board.found = seen, board.found | found
        return changed

    def note_again(self, number: int, now: float) -> None:
        """A board pulls, and sees that its note was lost."""
        if self.lost.get(number, now) < now:
            del self.lost[number]
            insort(self.noted, now)

    def all_in(self, board: _Board) -> bool:
        return board.seen == len(self.noted) and self.lost.keys() <= board.found


def simulate(fleet: Fleet, sizes: Sizes, http: Http) -> Outcome:
    """A night in which some boards learn, and the pulls until all have it, at least a day."""
    rng = Random(fleet.seed)
    pushes = _Pushes.of(fleet, rng)
    lost = len(pushes.lost)
    boards = [_board(fleet, rng) for _ in range(fleet.boards)]
    queue = [(_first(fleet, rng, n, board.chance), n) for n, board in enumerate(boards)]
    heapq.heapify(queue)
    back = pushes.last + fleet.down_h * HOUR
    free = 0.0  # when the line is free
    asked, have, on = Counter[int](), list[float](), list[float]()
    off = fleet.away * fleet.boards  # boards of lower numbers are off for the first day
    out = both = longest = 0.0
    requests, end, now = 0, max(DAY, back), 0.0
    while queue:
        now, n = heapq.heappop(queue)
        if now > end and len(have) == fleet.boards:
            break
        board = boards[n]
        if pushes.last <= now < back:
            schedule.failed(board.memory, "", now, board.chance)
            heapq.heappush(queue, (board.memory.retry_s, n))
            continue
        schedule.done(board.memory)
        turns = _turns(fleet, board, now)
        changed = pushes.new(board, now, turns, fleet.boards)
        pull = _pull(fleet, sizes, http, changed, len(turns))
        free = max(now, free) + pull.down * 8 / (fleet.line_mbit * 1e6)
        done = max(free, now + pull.requests * http.round_trips * fleet.round_trip_s)
        longest = max(longest, done - now)
        _spread(asked, now, done, pull.requests)
        requests, out, both = requests + pull.requests, out + pull.down, both + pull.down + pull.up
        if not board.had and pushes.all_in(board):
            board.had = True
            have.append(done)
            on.append(done if n >= off else 0.0)
        pushes.note_again(n, now)
        heapq.heappush(queue, (max(done, now + schedule.interval(fleet.hours, board.chance)), n))
    days = max(now, end) / DAY
    have.sort()
    return Outcome(
        requests=requests,
        requests_a_day=requests / days,
        bytes_a_day=out / days,
        board_bytes_a_day=both / days / fleet.boards,
        most_a_second=max(asked.values()),
        half_s=have[len(have) // 2] - pushes.last,
        on_s=max(on) - pushes.last,
        all_s=have[-1] - pushes.last,
        longest_pull_s=longest,
        lost=lost,
    )


@dataclass(frozen=True, slots=True)
class _Pull:
    requests: int
    down: float  # bytes
    up: float


def _pull(fleet: Fleet, sizes: Sizes, http: Http, changed: int, turns: int) -> _Pull:
    """What one pull asks for, where `changed` boards have pushed since the last, and so many indexes' turns
    have come. All boards have an index in the hub, from nights before, and what those say is known already.
    """
    every, signatures = fleet.boards, 2
    keyring = sizes.keyring * every + sizes.keyring_signature
    index, records = sizes.index + sizes.index_signature, sizes.records
    bodies, content = signatures * changed + changed, changed * (index + records)
    match fleet.reading:
        case Reading.WHOLE:
            bodies, content = signatures * (1 + every) + changed, keyring + every * index + changed * records
            unchanged = 0
        case Reading.CONDITIONAL:
            bodies, unchanged = bodies + 1, 1 + every - changed  # that there is no overview is said, too
        case Reading.LISTED:
            listed = int(changed > 0)
            bodies, content = bodies + listed, content + listed * sizes.overview * every
            unchanged = 2 - listed + turns - changed * turns // every
    requests = bodies + unchanged
    down = content + bodies * http.answers + unchanged * http.unchanged
    return _Pull(requests, down, requests * http.asks)


def _board(fleet: Fleet, rng: Random) -> _Board:
    """One that has been at work for long: it has asked for all indexes in their turns."""
    parts = -(-fleet.boards // LOOKS)
    turns = deque((-(parts - n) * max(fleet.hours * HOUR, DAY / parts), LOOKS) for n in range(parts - 1))
    turns.append((0.0, fleet.boards - LOOKS * (parts - 1)))
    return _Board(rng.random(), rng.randrange(fleet.boards), turns)


def _turns(fleet: Fleet, board: _Board, now: float) -> range:
    """The indexes, by their numbers, that were not asked for in a day, as far as one pull goes."""
    begin, count = board.turn, 0
    while board.looked and board.looked[0][0] <= now - DAY and count < LOOKS:
        when, many = board.looked.popleft()
        taken = min(many, LOOKS - count)
        if many > taken:
            board.looked.appendleft((when, many - taken))
        count += taken
    if count:
        board.looked.append((now, count))
    board.turn = (begin + count) % fleet.boards
    return range(begin, begin + count)


def _first(fleet: Fleet, rng: Random, number: int, chance: float) -> float:
    """When a board pulls first."""
    on = DAY if number < fleet.away * fleet.boards else 0.0
    if fleet.together:
        return on + (schedule.apart(fleet.hours, chance) if fleet.apart else 0.0)
    return on + rng.uniform(0, schedule.interval(fleet.hours, chance))


def _spread(asked: Counter[int], begin: float, end: float, requests: int) -> None:
    """Count requests by second, evenly over a pull."""
    for second, many in _shares(begin, end, requests):
        asked[second] += many


def _shares(begin: float, end: float, requests: int) -> Iterator[tuple[int, int]]:
    seconds = int(end) - int(begin) + 1
    for n in range(seconds):
        yield int(begin) + n, requests * (n + 1) // seconds - requests * n // seconds
