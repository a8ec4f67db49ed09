"""Provides the lease, the right to use the device for tuning: a state machine without clocks or I/O.

One tuner at a time holds the lease; the others wait in the order in which they asked. Events are method calls
with a time in monotonic seconds. They return the actions to perform.
"""

from __future__ import annotations

import bisect
import enum
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from honed.protocol.errors import InvalidArgument
from honed.protocol.service import Bucket, Releases

# Upper ends of the histogram's buckets, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RECENT = 1000  # Number of releases that the percentiles are computed from


class LeasePhase(enum.Enum):
    """The phase of the lease; the values are the protocol's."""

    FREE = "free"
    GRANTED = "granted"
    REVOKING = "revoking"  # Revoked; the holder may finish its candidate
    OVERDUE = "overdue"  # Revoked, and not released within the bound that the holder stated


@dataclass(frozen=True, slots=True)
class Grant:
    """Tell a tuner that it holds lease `number`."""

    holder: int
    number: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Tell the holder to release its lease, and why."""

    holder: int
    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """Log that the holder did not release its lease within `bound` seconds."""

    holder: int
    number: int
    bound: float


Action = Grant | Revoke | Overdue


@dataclass(slots=True, kw_only=True)
class HeldLease:
    """A granted lease; `bound` is in seconds, the other times in monotonic seconds."""

    holder: int
    number: int
    bound: float
    since: float
    revoked: float | None = None
    why: str = ""  # Reason of the revocation
    request: float | None = None  # Arrival of the first request that shares the device with the holder
    overdue: bool = False


@dataclass(slots=True)
class LeaseCounts:
    """Counts of leases since the service started; `seconds` is the total length of ended ones."""

    granted: int = 0
    revoked: int = 0
    overdue: int = 0
    seconds: float = 0.0


class ReleaseTimes:
    """A histogram of release times: from the arrival of the interrupting request to the release."""

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

    def summary(self) -> Releases:
        """Return the statistics of all times; the percentiles cover the latest `RECENT`, 0 without any.

        p50 is the least time that 50 % do not exceed.
        """
        ordered = sorted(self._recent)
        p50, p99 = (ordered[-(-len(ordered) * p // 100) - 1] if ordered else 0.0 for p in (50, 99))
        ends = (*BUCKETS, None)
        return Releases(
            count=sum(self._counts),
            p50_ms=p50 * 1e3,
            p99_ms=p99 * 1e3,
            max_ms=self._most * 1e3,
            sum_seconds=self._sum,
            buckets=tuple(
                Bucket(le_seconds=end, count=count)
                for end, count in zip(ends, accumulate(self._counts), strict=True)
            ),
        )


class Lease:
    """The lease of the device; holders are identified by the number of their connection."""

    def __init__(self) -> None:
        self.held: HeldLease | None = None
        self.counts = LeaseCounts()
        self.releases = ReleaseTimes()
        self._waiting: dict[int, float] = {}  # Bounds of waiting tuners in seconds, in order of request
        self._idle = False
        self._why = "the machine's signals were not read yet"

    @property
    def phase(self) -> LeasePhase:
        """The present phase of the lease."""
        if self.held is None:
            return LeasePhase.FREE
        if self.held.revoked is None:
            return LeasePhase.GRANTED
        return LeasePhase.OVERDUE if self.held.overdue else LeasePhase.REVOKING

    @property
    def waiting(self) -> tuple[int, ...]:
        """The tuners that wait for the lease, in order of request."""
        return tuple(self._waiting)

    @property
    def why(self) -> str:
        """The reason why a tuner that asks now would not get the lease; "" if it would."""
        if self.held is not None:
            return "another tuner has the lease"
        return "" if self._idle else self._why

    def seconds(self, now: float) -> float:
        """Return the total time that the lease was held, in seconds."""
        return self.counts.seconds + (now - self.held.since if self.held else 0.0)

    def enqueue(self, tuner: int, bound: float, now: float) -> list[Action]:
        """Queue a tuner for the lease, which it will release within `bound` seconds of a revocation.

        Asking again only changes the bound. Raises InvalidArgument for the holder of a revoked lease: it must
        release that first.
        """
        if self.held is not None and self.held.holder == tuner:
            if self.held.revoked is not None:
                raise InvalidArgument(f"lease {self.held.number} was revoked; release it before asking again")
            self.held.bound = bound
            return []
        self._waiting[tuner] = bound
        return self._grant(now)

    def release(self, tuner: int, number: int, now: float) -> list[Action]:
        """Free the lease that a tuner releases; ignore a lease that it does not hold."""
        if self.held is None or (self.held.holder, self.held.number) != (tuner, number):
            return []
        return self._free(now)

    def forget(self, tuner: int, now: float) -> list[Action]:
        """Forget a tuner whose connection ended, and free the lease if it held it."""
        self._waiting.pop(tuner, None)
        if self.held is None or self.held.holder != tuner:
            return []
        return self._free(now)

    def withdraw(self, tuner: int) -> None:
        """Remove a tuner that no longer wants the lease from the queue."""
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
        """Report an overdue holder, once."""
        held = self.held
        if held is None or held.revoked is None or held.overdue or now - held.revoked <= held.bound:
            return []
        held.overdue = True
        self.counts.overdue += 1
        return [Overdue(held.holder, held.number, held.bound)]

    def due(self) -> float | None:
        """Return when the holder becomes overdue, in monotonic seconds, or None."""
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

    def _free(self, now: float) -> list[Action]:
        held = self.held
        assert held is not None
        self.counts.seconds += now - held.since
        if held.request is not None:
            self.releases.add(now - held.request)
        self.held = None
        return self._grant(now)
