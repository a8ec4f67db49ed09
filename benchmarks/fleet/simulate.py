"""The simulation: boards pull by their own clocks, push after their night, and share one line to the hub.

Pure but for a seeded random generator: the same figures for the same arguments.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random

from .sizes import Http, Sizes

HOUR = 3600.0
_LISTED = 72.0  # bytes of a list, of each board's index: a hash and the board's number


class Reading(Enum):
    """How a pull finds out what is new."""

    WHOLE = "every index, each time"
    CONDITIONAL = "every index, if changed (ETag)"
    LISTED = "one list of what changed (ETag), then that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is simulated. Times are seconds, from midnight of the first day."""

    boards: int = 1000
    pushers: int = 1  # boards that learn something in the night
    hours: float = 6.0  # between two pulls
    jitter: float = 0.1  # of that, either way; 0: all boards keep step
    away: float = 0.02  # share of boards that are off for the first day
    line_mbit: float = 100.0  # a second, out of the hub
    round_trip_s: float = 0.03
    reading: Reading = Reading.CONDITIONAL
    together: bool = False  # all boards pull first at the same moment, as after a power cut
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


@dataclass(slots=True)
class _Board:
    seen: int = 0  # pushes that it has the records of
    next_s: float = 0.0


def simulate(fleet: Fleet, sizes: Sizes, http: Http) -> Outcome:
    """A night in which some boards learn, and the pulls until all have it, at least a day."""
    rng = Random(fleet.seed)
    pushes = sorted(rng.uniform(5 * HOUR, 7 * HOUR) for _ in range(fleet.pushers))
    boards = [_Board(next_s=_first(fleet, rng, n)) for n in range(fleet.boards)]
    queue = [(board.next_s, n) for n, board in enumerate(boards)]
    heapq.heapify(queue)
    free = 0.0  # when the line is free
    asked, have, on = Counter[int](), list[float](), list[float]()
    off = fleet.away * fleet.boards  # boards of lower numbers are off for the first day
    out = both = longest = 0.0
    requests, end, now = 0, 24 * HOUR, 0.0
    while queue:
        now, n = heapq.heappop(queue)
        if now > end and len(have) == fleet.boards:
            break
        board = boards[n]
        pushed = _before(pushes, now)
        pull = _pull(fleet, sizes, http, changed=pushed - board.seen)
        free = max(now, free) + pull.down * 8 / (fleet.line_mbit * 1e6)
        done = max(free, now + pull.requests * http.round_trips * fleet.round_trip_s)
        longest = max(longest, done - now)
        _spread(asked, now, done, pull.requests)
        requests, out, both = requests + pull.requests, out + pull.down, both + pull.down + pull.up
        if pushed == len(pushes) and board.seen < pushed:
            have.append(done)
            on.append(done if n >= off else 0.0)
        board.seen = pushed
        wait = fleet.hours * HOUR * (1 + rng.uniform(-fleet.jitter, fleet.jitter))
        heapq.heappush(queue, (max(done, now + wait), n))
    days = max(now, end) / (24 * HOUR)
    have.sort()
    last = pushes[-1]
    return Outcome(
        requests=requests,
        requests_a_day=requests / days,
        bytes_a_day=out / days,
        board_bytes_a_day=both / days / fleet.boards,
        most_a_second=max(asked.values()),
        half_s=have[len(have) // 2] - last,
        on_s=max(on) - last,
        all_s=have[-1] - last,
        longest_pull_s=longest,
    )


@dataclass(frozen=True, slots=True)
class _Pull:
    requests: int
    down: float  # bytes
    up: float


def _pull(fleet: Fleet, sizes: Sizes, http: Http, changed: int) -> _Pull:
    """What one pull asks for, where `changed` boards have pushed since the last; each file has a signature.

    All boards have an index in the hub, from nights before, and what those say is known already.
    """
    every, signatures = fleet.boards, 2
    keyring = sizes.keyring * every + sizes.keyring_signature
    index, records = sizes.index + sizes.index_signature, sizes.records
    match fleet.reading:
        case Reading.WHOLE:
            bodies, content, unchanged = signatures * (1 + every), keyring + every * index, 0
        case Reading.CONDITIONAL:
            bodies, content = signatures * changed, changed * index
            unchanged = signatures * (1 + every - changed)
        case Reading.LISTED:
            listed = int(changed > 0)
            bodies, content = listed + signatures * changed, listed * _LISTED * every + changed * index
            unchanged = 1 - listed
    bodies, content = bodies + changed, content + changed * records
    requests = bodies + unchanged
    down = content + bodies * http.answers + unchanged * http.unchanged
    return _Pull(requests, down, requests * http.asks)


def _first(fleet: Fleet, rng: Random, number: int) -> float:
    """When a board pulls first."""
    away = 24 * HOUR if number < fleet.away * fleet.boards else 0.0
    return away + (0.0 if fleet.together else rng.uniform(0, fleet.hours * HOUR))


def _before(pushes: list[float], now: float) -> int:
    return bisect_right(pushes, now)


def _spread(asked: Counter[int], begin: float, end: float, requests: int) -> None:
    """Count requests by second, evenly over a pull."""
    for second, many in _shares(begin, end, requests):
        asked[second] += many


def _shares(begin: float, end: float, requests: int) -> Iterator[tuple[int, int]]:
    seconds = int(end) - int(begin) + 1
    for n in range(seconds):
        yield int(begin) + n, requests * (n + 1) // seconds - requests * n // seconds
