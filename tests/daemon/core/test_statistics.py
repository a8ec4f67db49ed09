"""Statistics: histograms beside numpy, the last minute, what is counted and that nothing is uncounted."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.core.statistics import (
    ERROR,
    HIGHEST,
    LOWEST,
    MAX_BUCKETS,
    Histogram,
    Recent,
    ServedInference,
    Statistics,
    duration,
)
from honed.daemon.methods.pipeline import counted
from honed.protocol.service import DurationSummary, RecentFigures
from honed.runtime.errors import HonedError, InvalidArgument

SECONDS = st.floats(LOWEST, HIGHEST)
SHARES = st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])
ROUNDING = 1e-9  # of the logarithms


def filled(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(duration(value))
    return histogram


@given(st.lists(SECONDS, min_size=1, max_size=300), SHARES)
def test_quantiles_are_within_their_error_of_numpys(values: list[float], share: float) -> None:
    exact = float(np.quantile(values, share, method="lower"))
    found = filled(values).quantile(share)
    assert found is not None
    assert abs(found - exact) <= (ERROR + ROUNDING) * exact


def test_quantiles_of_latencies_like_real_ones() -> None:
    values = np.random.default_rng(5).lognormal(math.log(0.012), 0.7, 20_000)
    histogram = filled(values.tolist())
    for key, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert getattr(histogram.summary(), key) == pytest.approx(
            np.quantile(values, share), rel=ERROR + 0.002
        )
    assert histogram.summary().max == values.max()
    assert histogram.sum == pytest.approx(values.sum())


@given(st.lists(SECONDS, max_size=50), st.lists(SECONDS, max_size=50), SHARES)
def test_merging_is_counting_everything(first: list[float], second: list[float], share: float) -> None:
    merged = filled(first)
    merged.merge(filled(second))
    whole = filled(first + second)
    assert merged.quantile(share) == whole.quantile(share)
    assert (merged.count, merged.largest, len(merged._buckets)) == (
        whole.count,
        whole.largest,
        len(whole._buckets),
    )
    assert merged.sum == pytest.approx(whole.sum)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_any_number_is_counted_in_bounded_memory(values: list[float]) -> None:
    histogram = filled(values)
    assert histogram.count == len(values)
    assert len(histogram._buckets) <= min(len(values), MAX_BUCKETS)
    found = histogram.quantile(0.5)
    assert found is not None
    assert 0 < found <= HIGHEST * (1 + ERROR) ** 2


def test_every_bucket_there_can_be() -> None:
    histogram = filled(np.geomspace(LOWEST / 10, HIGHEST * 10, 100_000).tolist())
    assert MAX_BUCKETS - 3 <= len(histogram._buckets) <= MAX_BUCKETS


def test_nothing_counted_has_no_quantiles() -> None:
    assert Histogram().summary() == DurationSummary(count=0, sum=0.0, p50=None, p95=None, p99=None, max=None)


def test_the_last_minute_forgets() -> None:
    recent = Recent()
    recent.add(duration(1.0), now=1000.0)
    recent.add(duration(2.0), now=1009.9)
    assert recent.merge_slices(1055.0).count == 2
    assert recent.merge_slices(1060.0).count == 0
    recent.add(duration(3.0), now=1060.0)
    assert recent.merge_slices(1060.0).count == 1
    assert Recent.seconds_covered(1055.0) == 55.0
    assert Recent.seconds_covered(1060.0) == 50.0


@given(st.lists(st.floats(0, 100), max_size=40), st.floats(0, 200))
def test_the_last_minute_is_what_it_says(gaps: list[float], later: float) -> None:
    moments = np.cumsum(gaps).tolist() if gaps else []
    recent = Recent()
    for moment in moments:
        recent.add(duration(0.1), moment)
    now = (moments[-1] if moments else 0.0) + later
    begin = now - Recent.seconds_covered(now)
    certain = sum(moment > begin + 1e-6 for moment in moments)
    possible = sum(moment >= begin - 1e-6 for moment in moments)
    assert certain <= recent.merge_slices(now).count <= possible


def served(statistics: Statistics, seconds: float = 0.2) -> None:
    inference = ServedInference(
        engine="gpu", queued=0.1, total=seconds, input_ns=1, infer_ns=50_000_000, output_ns=3, launches=7
    )
    statistics.count_served(inference, now=5.0, wall_ms=123)


def test_what_a_model_counts_is_counted_for_all() -> None:
    whole = Statistics()
    one, other = Statistics(parent=whole), Statistics(parent=whole)
    with counted(one):
        served(one)
    with pytest.raises(InvalidArgument), counted(other):
        raise InvalidArgument("no")
    other.count_retry()
    told = whole.figures(now=5.0, uptime=10.0)
    assert (told.requests, told.served, told.retries) == (2, 1, 1)
    assert told.failures == {"INVALID_ARGUMENT": 1}
    assert told.kernel_executions == 7
    assert told.device_seconds == 0.05
    assert told.latency.p99 == pytest.approx(0.2, rel=ERROR)
    assert told.queue_time.p50 == pytest.approx(0.1, rel=ERROR)
    assert told.recent == RecentFigures(seconds=10.0, per_second=0.1, latency=told.latency)
    assert one.figures(5.0, 10.0).failures == {}
    triton = one.triton("m")
    assert (triton.name, triton.inference_count, triton.last_inference) == ("m", 1, 123)
    success = triton.inference_stats.success
    assert (success.count, success.ns) == (1, 200_000_000)
    assert other.triton("m").inference_stats.fail.count == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HonedError("x"), HonedError.code),
        (asyncio.CancelledError(), "CANCELLED"),
        (ZeroDivisionError(), "INTERNAL"),
    ],
)
def test_every_end_of_a_request_is_counted(error: BaseException, code: str) -> None:
    statistics = Statistics()
    with pytest.raises(type(error)), counted(statistics):
        raise error
    assert statistics.failures == {code: 1}
    assert statistics.requests == 1
