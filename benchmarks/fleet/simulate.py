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
    pulls: int = 0


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
        pull = _pull(fleet, sizes, http, first=board.pulls == 0, changed=pushed - board.seen)
        free = max(now, free) + pull.down * 8 / (fleet.line_mbit * 1e6)
        done = max(free, now + pull.requests * http.round_trips * fleet.round_trip_s)
        longest = max(longest, done - now)
        _spread(asked, now, done, pull.requests)
        requests, out, both = requests + pull.requests, out + pull.down, both + pull.down + pull.up
        if pushed == len(pushes) and board.seen < pushed:
            have.append(done)
            on.append(done if n >= off else 0.0)
        board.seen, board.pulls = pushed, board.pulls + 1
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


def _pull(fleet: Fleet, sizes: Sizes, http: Http, *, first: bool, changed: int) -> _Pull:
    """What one pull asks for, where `changed` boards have pushed since; an index and its signature each."""
    sought: list[tuple[int, float]] = []  # how many answers with a body, and its size
    unchanged = 0
    keyring = [(1, sizes.keyring * fleet.boards), (1, sizes.keyring_signature)]
    signed = [(1, sizes.index), (1, sizes.index_signature)]
    present = fleet.pushers  # boards that have an index in the hub
    read = present if fleet.reading is Reading.WHOLE or first else changed
    if fleet.reading is Reading.WHOLE or first:
        sought += keyring
    else:
        unchanged += 2
    if fleet.reading is Reading.CONDITIONAL and not first:
        unchanged += 2 * (present - changed)
    if fleet.reading is Reading.LISTED:
        sought += [(1, 72.0 * fleet.boards)] if first or changed else []
        unchanged += 0 if first or changed else 1
    sought += [(read * n, size) for n, size in signed]
    sought += [(changed, sizes.records)]
    missing = fleet.boards - present if fleet.reading is not Reading.LISTED else 0  # 404, named but empty
    bodies = sum(n for n, _ in sought)
    requests = bodies + unchanged + missing
    down = sum(n * (size + http.answers) for n, size in sought)
    down += unchanged * http.unchanged + missing * http.missing
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
