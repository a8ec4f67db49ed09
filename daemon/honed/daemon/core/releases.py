"""How long tuners took to leave the device, from the arrival of the request that interrupted them."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)  # upper ends, seconds
RECENT = 1000  # the percentiles are of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """In seconds; 0 without any.

    `count` and `most` are since the service started, the percentiles of the last `RECENT`.
    """

    count: int
    p50: float
    p99: float
    most: float


class ReleaseTimes:
    """A histogram since the start, and the latest times."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0
        self._most = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._recent.append(seconds)
        self._counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds
        self._most = max(self._most, seconds)

    @property
    def total(self) -> float:
        """Seconds, all together."""
        return self._sum

    def summary(self) -> Summary:
        """Count and percentiles (the least value that so many percent do not exceed)."""
        ordered = sorted(self._recent)
        p50, p99 = (ordered[-(-len(ordered) * p // 100) - 1] if ordered else 0.0 for p in (50, 99))
        return Summary(count=sum(self._counts), p50=p50, p99=p99, most=self._most)

    def cumulative(self) -> list[tuple[float, int]]:
        """For each bucket its upper end (the last: infinity) and how many times were not above it."""
        return list(zip((*BUCKETS, float("inf")), accumulate(self._counts), strict=True))
