"""Which records travel to be learned from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.tuner.records.exchange import LEAST_SPREAD, SPREAD, spread
from honed.tuner.records.store import Records
from tests.tuner.records.test_records import SETUP, WRONG, add, new, right, trace


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    with Records.open(tmp_path / "records.db", measured_by="board") as opened:
        yield opened


def numbers(records: Records, workload: str = "dense") -> list[int]:
    known = {trace(number): number for number in range(200)}
    return sorted(known[found.trace] for found in spread(records, SETUP) if found.workload == workload)


def test_of_few_candidates_all_are_there(records: Records) -> None:
    add(records, 1, right(2.0))
    add(records, 2, WRONG)
    add(records, 3, right(1.0), workload="softmax")
    records.begin(new(4))  # no verdict yet
    assert (numbers(records), numbers(records, "softmax")) == ([1, 2], [3])


def test_of_many_the_fastest_the_slowest_and_the_refused(records: Records) -> None:
    for number in range(100):
        add(records, number, WRONG if number % 4 == 3 else right(1.0 + number))
    found = numbers(records)
    assert len(found) == SPREAD
    assert found[0] == 0
    assert sum(number % 4 == 3 for number in found) == pytest.approx(SPREAD / 4, abs=1)
    assert found == numbers(records)


def test_of_very_many_tasks_fewer_each(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("honed.tuner.records.exchange.MOST_SPREAD", 30)
    for number in range(60):
        add(records, number, right(1.0 + number), workload=("dense", "softmax", "pool")[number % 3])
    assert len(numbers(records)) == max(LEAST_SPREAD, 10)


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=60))
def test_the_best_is_always_there(tmp_path_factory: pytest.TempPathFactory, times: list[float]) -> None:
    with Records.open(tmp_path_factory.mktemp("r") / "r.db", measured_by="board") as records:
        for number, milliseconds in enumerate(times):
            add(records, number, right(milliseconds))
        found = numbers(records)
        assert len(found) == min(len(times), SPREAD)
        assert min(times[number] for number in found) == min(times)
        assert max(times[number] for number in found) == max(times)
