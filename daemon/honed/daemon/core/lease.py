"""Who may use the device for tuning: a state machine without clocks or I/O.

One tuner at a time holds the lease, the others wait in the order in which they asked. What arrives are
method calls with a time (seconds of a steady clock); what is to be sent comes back as a list of actions.
"""

from __future__ import annotations

import bisect
import enum
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from honed.protocol.errors import InvalidArgument

# Upper ends of how long a release takes, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RECENT = 1000  # The percentiles are of so many


class LeasePhase(enum.Enum):
    """What the lease is doing; the values are the protocol's."""

    FREE = "free"
    GRANTED = "granted"
    REVOKING = "revoking"  # The holder was told to leave and may finish its candidate
    OVERDUE = "overdue"  # It did not within the bound it stated


@dataclass(frozen=True, slots=True)
class Grant:
    """Tell a tuner that it holds lease `number`."""

    holder: int
    number: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Tell the holder to leave."""

    holder: int
    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """The holder should have left after `bound` seconds; for the log."""

    holder: int
    number: int
    bound: float


Action = Grant | Revoke | Overdue


@dataclass(slots=True, kw_only=True)
class HeldLease:
    """The lease as it is held; `bound` in seconds, the rest moments."""

    holder: int
    number: int
    bound: float
    since: float
    revoked: float | None = None
    why: str = ""  # It was revoked
    request: float | None = None  # When the first request came that must share the device with the holder
    overdue: bool = False


@dataclass(slots=True)
class LeaseCounts:
    """Since the service started; `seconds` of leases that have ended."""

    granted: int = 0
    revoked: int = 0
    overdue: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSummary:
    """Of such times, in seconds; 0 without any.

    `count` and `most` are since the service started, the percentiles of the last `RECENT`.
    """

    count: int
    p50: float
    p99: float
    most: float


class ReleaseTimes:
    """How long tuners took to leave the device, from the arrival of the request that interrupted them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0
        self._most = 0.0

    def add(self, seconds: float) -> None:
        """Add a time to the summary."""
        self._recent.append(seconds)
        self._counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds
        self._most = max(self._most, seconds)

    @property
    def total(self) -> float:
        """Seconds, all together."""
        return self._sum

    def summary(self) -> ReleaseSummary:
        """Count and percentiles (the least value that so many percent do not exceed)."""
        ordered = sorted(self._recent)
        p50, p99 = (ordered[-(-len(ordered) * p // 100) - 1] if ordered else 0.0 for p in (50, 99))
        return ReleaseSummary(count=sum(self._counts), p50=p50, p99=p99, most=self._most)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return for each bucket its upper end (the last: infinity) and how many times were not above it."""
        return list(zip((*BUCKETS, float("inf")), accumulate(self._counts), strict=True))


class Lease:
    """The lease. Holders are named by a number, of their connection."""

    def __init__(self) -> None:
        self.held: HeldLease | None = None
        self.counts = LeaseCounts()
        self.releases = ReleaseTimes()
        self._waiting: dict[int, float] = {}  # Their bounds, in the order of asking
        self._idle = False
        self._why = "the machine's signals were not read yet"

    @property
    def phase(self) -> LeasePhase:
        """What the lease is doing."""
        if self.held is None:
            return LeasePhase.FREE
        if self.held.revoked is None:
            return LeasePhase.GRANTED
        return LeasePhase.OVERDUE if self.held.overdue else LeasePhase.REVOKING

    @property
    def waiting(self) -> tuple[int, ...]:
        """Who asked and does not hold it, the first to ask first."""
        return tuple(self._waiting)

    @property
    def why(self) -> str:
        """Why a tuner that asks now would not get it; "" where it would."""
        if self.held is not None:
            return "another tuner has the lease"
        return "" if self._idle else self._why

    def seconds(self, now: float) -> float:
        """Return how long the lease was held in all, in seconds."""
        return self.counts.seconds + (now - self.held.since if self.held else 0.0)

    def asked(self, tuner: int, bound: float, now: float) -> list[Action]:
        """Queue a tuner for the lease; it will leave within `bound` seconds of being told.

        Asking again changes nothing but the bound. Raises InvalidArgument for the holder of a lease that was
        revoked: it must release that first.
        """
        if self.held is not None and self.held.holder == tuner:
            if self.held.revoked is not None:
                raise InvalidArgument(f"lease {self.held.number} was revoked; release it before asking again")
            self.held.bound = bound
            return []
        self._waiting[tuner] = bound
        return self._grant(now)

    def released(self, tuner: int, number: int, now: float) -> list[Action]:
        """Free the lease that a tuner has released; for a lease that it does not hold, change nothing."""
        if self.held is None or (self.held.holder, self.held.number) != (tuner, number):
            return []
        return self._freed(now)

    def gone(self, tuner: int, now: float) -> list[Action]:
        """Forget a tuner whose connection ended, and free the lease if it held it."""
        self._waiting.pop(tuner, None)
        if self.held is None or self.held.holder != tuner:
            return []
        return self._freed(now)

    def withdrawn(self, tuner: int) -> None:
        """Remove a tuner that does not want the lease any more from the queue."""
        self._waiting.pop(tuner, None)

    def request(self, why: str, now: float) -> list[Action]:
        """Revoke the lease for a request; the machine is not idle until new readings say that it is."""
        self._idle, self._why = False, why
        if self.held is None:
            return []
        if self.held.request is None:
            self.held.request = now
        return self._revoke(why, now)

    def readings(self, idle: bool, why: str, now: float) -> list[Action]:
        """Grant or revoke the lease by the latest readings; `why` says why the machine is not idle."""
        self._idle, self._why = idle, why
        return self._grant(now) if idle else self._revoke(why, now)

    def tick(self, now: float) -> list[Action]:
        """Report a holder that is overdue, once, as time passes."""
        held = self.held
        if held is None or held.revoked is None or held.overdue or now - held.revoked <= held.bound:
            return []
        held.overdue = True
        self.counts.overdue += 1
        return [Overdue(held.holder, held.number, held.bound)]

    def due(self) -> float | None:
        """Return when `tick` has something to report if the holder does not leave before, or None."""
        if self.held is None or self.held.revoked is None or self.held.overdue:
            return None
        return self.held.revoked + self.held.bound

    def _grant(self, now: float) -> list[Action]:
        if self.held is not None or not self._idle or not self._waiting:
            return []
        tuner = next(iter(self._waiting))
        bound = self._waiting.pop(tuner)
        self.counts.granted += 1
        self.held = HeldLease(holder=tuner, number=self.counts.granted, bound=bound, since=now)
        return [Grant(tuner, self.held.number)]

    def _revoke(self, why: str, now: float) -> list[Action]:
        if self.held is None or self.held.revoked is not None:
            return []
        self.held.revoked, self.held.why = now, why
        self.counts.revoked += 1
        return [Revoke(self.held.holder, self.held.number, why)]

    def _freed(self, now: float) -> list[Action]:
        held = self.held
        assert held is not None
        self.counts.seconds += now - held.since
        if held.request is not None:
            self.releases.add(now - held.request)
        self.held = None
        return self._grant(now)
