"""The curve of what inferences took: small whatever its age, true to versions, kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.observe.latencies import POINTS, SPAN_SECONDS, Keeper, Latencies, thin
from honed.protocol.results import LatencyPoint


def test_a_span_is_a_median_of_one_version() -> None:
    curve = Latencies()
    for n, seconds in enumerate((0.001, 0.003, 0.002)):
        curve.note("m", 1, seconds, 100.0 + n)
    curve.note("m", 2, 0.001, 104.0)
    curve.note("m", 2, 0.001, 104.0 + SPAN_SECONDS)
    assert [(p.version, p.count, p.us) for p in curve.of("m")] == [
        (1, 3, pytest.approx(2000)),
        (2, 1, pytest.approx(1000)),
        (2, 1, pytest.approx(1000)),
    ]
    assert curve.of("other") == ()


def test_a_clock_that_is_set_back_begins_a_new_span() -> None:
    curve = Latencies()
    curve.note("m", 1, 0.001, 1000.0)
    curve.note("m", 1, 0.001, 10.0)
    assert [p.count for p in curve.of("m")] == [1, 1]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), max_size=3000))
def test_curves_stay_small_and_keep_their_newer_half(given_points: list[tuple[int, int]]) -> None:
    points: list[LatencyPoint] = []
    for n, (version, count) in enumerate(given_points):
        points = thin([*points, LatencyPoint(time=float(n), version=version, count=count, us=1.0)])
        assert len(points) <= POINTS
    newest = given_points[-(POINTS // 2 - 1) :]
    assert [(p.version, p.count) for p in points[len(points) - len(newest) :]] == newest
    assert [p.time for p in points] == sorted(p.time for p in points)


def test_merging_keeps_the_mean() -> None:
    points = [
        LatencyPoint(time=float(n), version=1, count=1 + n % 2, us=float(n % 7)) for n in range(POINTS + 1)
    ]
    merged = thin(points)
    assert sum(p.count for p in merged) == sum(p.count for p in points)
    assert sum(p.count * p.us for p in merged) == pytest.approx(sum(p.count * p.us for p in points))


def test_they_outlast_the_service(tmp_path: Path) -> None:
    path = tmp_path / "latencies.json"
    keeper = Keeper(path)
    keeper.latencies.note("m", 3, 0.002, 50.0)
    asyncio.run(keeper.save())
    again = Keeper(path)
    assert again.latencies.of("m") == keeper.latencies.of("m")
    again.latencies.forget("m")
    asyncio.run(again.save())
    assert Keeper(path).latencies.of("m") == ()
    path.write_text("{")
    assert Keeper(path).latencies.of("m") == ()
