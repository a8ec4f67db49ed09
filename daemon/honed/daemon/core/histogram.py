"""Durations counted in logarithmic buckets: bounded memory, and quantiles with a known relative error.

The buckets are those of DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch
with relative-error guarantees", VLDB 2019): bucket i holds the values in (g^(i-1), g^i] with
g = (1 + e) / (1 - e), and 2 g^i / (g + 1) is within the relative error e of all of them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from honed.protocol.service import Spans

ERROR = 0.01
LOWEST, HIGHEST = 1e-7, 1e6  # seconds; what lies outside counts as these
_GROWTH = (1 + ERROR) / (1 - ERROR)
_LOG = math.log(_GROWTH)
MAX_BUCKETS = math.ceil(math.log(HIGHEST / LOWEST) / _LOG) + 2

SLICE_SECONDS = 10.0
SLICES = 6  # of a Recent


class Duration(NamedTuple):
    """Seconds, and the bucket that they are counted in."""

    seconds: float
    bucket: int


def duration(seconds: float) -> Duration:
    """To be counted, perhaps in several histograms.

    Below zero, which only a clock that was set can give, counts as zero.
    """
    bucket = math.ceil(math.log(min(max(seconds, LOWEST), HIGHEST)) / _LOG)
    return Duration(max(0.0, seconds), bucket)


class Histogram:
    """Counts of durations in seconds. `quantile` is within ERROR of the true one, LOWEST to HIGHEST."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.largest = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, duration: Duration) -> None:
        """Count one more."""
        seconds, bucket = duration
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.sum += seconds
        if seconds > self.largest:
            self.largest = seconds

    def quantile(self, share: float) -> float | None:
        """The value of rank floor(share * (count - 1)), from 0; None where nothing was counted."""
        rank = math.floor(share * (self.count - 1))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank < 0:
                return min(2 * _GROWTH**bucket / (_GROWTH + 1), max(self.largest, LOWEST))
        return None

    def merge(self, other: Histogram) -> None:
        """Count everything that `other` counted."""
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count
        self.sum += other.sum
        self.largest = max(self.largest, other.largest)

    @property
    def buckets(self) -> int:
        """How many it takes; never more than MAX_BUCKETS."""
        return len(self._buckets)

    def spans(self) -> Spans:
        """As Metrics shows them."""
        return Spans(
            count=self.count,
            sum=self.sum,
            p50=self.quantile(0.50),
            p95=self.quantile(0.95),
            p99=self.quantile(0.99),
            max=self.largest if self.count else None,
        )


class Recent:
    """Histograms of the last minute, in slices; moments are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, Histogram]] = deque(maxlen=SLICES)

    def add(self, duration: Duration, now: float) -> None:
        """Count one that ended now."""
        number = math.floor(now / SLICE_SECONDS)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, Histogram()))
        self._slices[-1][1].add(duration)

    def whole(self, now: float) -> Histogram:
        """What ended within the last `covered(now)` seconds."""
        merged = Histogram()
        oldest = math.floor(now / SLICE_SECONDS) - SLICES
        for number, histogram in self._slices:
            if number > oldest:
                merged.merge(histogram)
        return merged

    @staticmethod
    def covered(now: float) -> float:
        """Seconds that `whole` looks back: 50 to 60."""
        return (SLICES - 1) * SLICE_SECONDS + now % SLICE_SECONDS
