"""Counts requests, latencies and failures, for each model and for all. No I/O."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from honed.protocol.methods import VERSION
from honed.protocol.results import InferenceStatistics, ServedRequests, Tallied
from honed.protocol.service import DurationSummary, Figures, RecentFigures

# ---- Durations counted in logarithmic buckets: bounded memory, and quantiles with a known relative error
#
# The buckets are those of DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch
# with relative-error guarantees", VLDB 2019): bucket i holds the values in (g^(i-1), g^i] with
# g = (1 + e) / (1 - e), and 2 g^i / (g + 1) is within the relative error e of all of them.

ERROR = 0.01
LOWEST, HIGHEST = 1e-7, 1e6  # Seconds; what lies outside counts as these
_GROWTH = (1 + ERROR) / (1 - ERROR)
_LOG = math.log(_GROWTH)
MAX_BUCKETS = math.ceil(math.log(HIGHEST / LOWEST) / _LOG) + 2

SLICE_SECONDS = 10.0
SLICES = 6  # Slices that a Recent holds


class Duration(NamedTuple):
    """A duration in seconds, and the number of its histogram bucket."""

    seconds: float
    bucket: int


def duration(seconds: float) -> Duration:
    """Return a duration, whose bucket is computed once for several histograms.

    A negative one, which only a clock that was set back produces, counts as zero.
    """
    bucket = math.ceil(math.log(min(max(seconds, LOWEST), HIGHEST)) / _LOG)
    return Duration(max(0.0, seconds), bucket)


class Histogram:
    """A histogram of durations in seconds; `quantile` has the relative error ERROR from LOWEST to HIGHEST."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.largest = 0.0
        self._buckets: defaultdict[int, int] = defaultdict(int)

    @property
    def count(self) -> int:
        """The number of durations counted."""
        return sum(self._buckets.values())

    def add(self, duration: Duration) -> None:
        """Add a duration to the counts."""
        seconds, bucket = duration
        self._buckets[bucket] += 1
        self.sum += seconds
        if seconds > self.largest:
            self.largest = seconds

    def quantile(self, share: float) -> float | None:
        """Return the value of rank floor(share * (count - 1)), from 0; None if the histogram is empty."""
        rank = math.floor(share * (self.count - 1))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank < 0:
                return min(2 * _GROWTH**bucket / (_GROWTH + 1), max(self.largest, LOWEST))
        return None

    def merge(self, other: Histogram) -> None:
        """Add the counts of `other`."""
        for bucket, count in other._buckets.items():
            self._buckets[bucket] += count
        self.sum += other.sum
        self.largest = max(self.largest, other.largest)

    def summary(self) -> DurationSummary:
        """Return the summary of the histogram that Metrics shows."""
        return DurationSummary(
            count=self.count,
            sum=self.sum,
            p50=self.quantile(0.50),
            p95=self.quantile(0.95),
            p99=self.quantile(0.99),
            max=self.largest if self.count else None,
        )


class Recent:
    """A histogram that knows those of the last minute apart; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        # Durations of the last minute, by slice of time.
        self._slices: deque[tuple[float, Histogram]] = deque()
        self._older = Histogram()

    def add(self, duration: Duration, now: float) -> None:
        """Count a duration that ended at `now`."""
        number = now // SLICE_SECONDS
        if not self._slices or self._slices[-1][0] != number:
            if len(self._slices) == SLICES:
                self._older.merge(self._slices.popleft()[1])
            self._slices.append((number, Histogram()))
        self._slices[-1][1].add(duration)

    def merge(self) -> Histogram:
        """Return a histogram of all durations."""
        return _merged([self._older, *(histogram for _, histogram in self._slices)])

    def merge_slices(self, now: float) -> Histogram:
        """Return a histogram of the durations that ended within the last `seconds_covered(now)` seconds."""
        oldest = now // SLICE_SECONDS - SLICES
        return _merged(histogram for number, histogram in self._slices if number > oldest)

    @staticmethod
    def seconds_covered(now: float) -> float:
        """Return the number of seconds that `merge_slices` looks back: 50 to 60."""
        return (SLICES - 1) * SLICE_SECONDS + now % SLICE_SECONDS


def _merged(histograms: Iterable[Histogram]) -> Histogram:
    whole = Histogram()
    for each in histograms:
        whole.merge(each)
    return whole


@dataclass(slots=True, kw_only=True)  # Constructing a frozen one takes four times as long
class ServedInference:
    """The times of an inference: `queued`, `total` (arrival to answer) in seconds; the worker's in ns.

    `engine` is the kind of engine that answered: "gpu", "cpu" or "gpu+cpu".
    """

    engine: str
    queued: float
    total: float
    input_ns: int
    infer_ns: int
    output_ns: int
    launches: int


@dataclass(slots=True)
class Statistics:
    """Statistics of a model or variant since the service started; they count in `parent` as well.

    Counts never decrease.
    """

    parent: Statistics | None = None
    last_inference: int = 0  # Time of the last inference (milliseconds since 1970)
    requests: int = 0
    retries: int = 0  # Runs of a request beyond its first
    preconditions: int = 0  # Requests with values that the compiled file does not accept
    batched_requests: int = 0  # Requests that were run as one with others
    batches: int = 0  # Runs of joined requests
    kernels: int = 0  # Executed for requests that were answered
    engines: Counter[str] = field(default_factory=Counter)  # Answers by kind of engine
    failures: Counter[str] = field(default_factory=Counter)  # Failed requests by the error's code
    latency: Recent = field(default_factory=Recent)
    queued: Histogram = field(default_factory=Histogram)
    failed_ns: int = 0  # Sum over failed requests
    input_ns: int = 0  # Sums over answered requests, as are the next two
    infer_ns: int = 0
    output_ns: int = 0
    # This object, its parent, the parent of that, up to the last.
    lineage: tuple[Statistics, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.lineage = (self, *(() if self.parent is None else self.parent.lineage))

    @property
    def served(self) -> int:
        """The number of requests that an engine answered."""
        return self.engines.total()

    def count_arrival(self) -> None:
        """Count a request that arrived."""
        for each in self.lineage:
            each.requests += 1

    def count_failure(self, code: str, ns: int) -> None:
        """Count a request that failed with an error of this code after `ns` nanoseconds."""
        for each in self.lineage:
            each.failures[code] += 1
            each.failed_ns += ns

    def count_served(self, inference: ServedInference, now: float, wall_ms: int) -> None:
        """Count an inference that was answered, at `now` of a monotonic clock."""
        whole, queued = duration(inference.total), duration(inference.queued)
        for each in self.lineage:
            each.last_inference = wall_ms
            each.kernels += inference.launches
            each.engines[inference.engine] += 1
            each.latency.add(whole, now)
            each.queued.add(queued)
            each.input_ns += inference.input_ns
            each.infer_ns += inference.infer_ns
            each.output_ns += inference.output_ns

    def count_batch(self, requests: int) -> None:
        """Count `requests` requests that were run as one."""
        for each in self.lineage:
            each.batched_requests += requests
            each.batches += 1

    def count_retry(self) -> None:
        """Count a request that is run again because its worker failed."""
        for each in self.lineage:
            each.retries += 1

    def count_precondition(self) -> None:
        """Count a request with values that the compiled file does not accept."""
        for each in self.lineage:
            each.preconditions += 1

    def triton(self, name: str, engine: str = "", device: str = "") -> ServedRequests:
        """Return the statistics as ModelStatistics shows them, with the name of the engine that serves."""
        return ServedRequests(
            name=name,
            version=VERSION,
            last_inference=self.last_inference,
            inference_count=self.served,
            execution_count=self.served - self.batched_requests + self.batches,
            inference_stats=InferenceStatistics(
                success=self._tally(round(self.latency.merge().sum * 1e9)),
                fail=Tallied(count=self.failures.total(), ns=self.failed_ns),
                queue=self._tally(round(self.queued.sum * 1e9)),
                compute_input=self._tally(self.input_ns),
                compute_infer=self._tally(self.infer_ns),
                compute_output=self._tally(self.output_ns),
            ),
            engine_name=engine,
            device=device,
        )

    def figures(self, now: float, uptime: float) -> Figures:
        """Return the statistics as Metrics shows them; times in seconds."""
        recent, covered = self.latency.merge_slices(now), min(Recent.seconds_covered(now), uptime)
        return Figures(
            requests=self.requests,
            served=self.served,
            failures=dict(sorted(self.failures.items())),
            retries=self.retries,
            batches=self.batches,
            batched=self.batched_requests,
            engines=dict(sorted(self.engines.items())),
            kernel_executions=self.kernels,
            device_seconds=self.infer_ns / 1e9,
            latency=self.latency.merge().summary(),
            queue_time=self.queued.summary(),
            recent=RecentFigures(
                seconds=covered,
                per_second=recent.count / covered if covered > 0 else 0.0,
                latency=recent.summary(),
            ),
        )

    def _tally(self, ns: int) -> Tallied:
        """Return a sum of nanoseconds with the number of answered requests."""
        return Tallied(count=self.served, ns=ns)
