"""The simulation of a fleet and its hub, whose figures docs/measurements.md has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.fleet.search import Search
from benchmarks.fleet.simulate import DAY, HOUR, Fleet, Reading, simulate
from benchmarks.fleet.sizes import Http, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.hub.looking import LOOKS

SIZES = Sizes(keyring=100, keyring_signature=300, index=500, index_signature=300, records=10_000, count=36)
fleets = st.builds(
    Fleet,
    boards=st.integers(2, 40),
    pushers=st.integers(1, 2),
    hours=st.floats(0.5, 24),
    away=st.floats(0, 0.5),
    together=st.booleans(),
    apart=st.booleans(),
    noting_s=st.floats(0, 7200),
    down_h=st.sampled_from([0.0, 1.0, 24.0]),
    reading=st.sampled_from(Reading),
    seed=st.integers(0, 1000),
)


@settings(max_examples=50, deadline=None)
@given(fleets)
def test_all_boards_have_all_in_the_end(fleet: Fleet) -> None:
    told = simulate(fleet, SIZES, Http())
    assert told == simulate(fleet, SIZES, Http()), "the same for the same seed"
    assert 0 <= told.half_s <= told.all_s
    late = DAY if told.lost else 0.0  # whose note was lost is off for a day at the most
    away = (fleet.down_h + 6) * HOUR if fleet.down_h else 0.0  # and honed-hub tries again
    assert told.on_s <= told.all_s <= DAY + 3 * 1.1 * fleet.hours * HOUR + late + away
    assert told.bytes_a_day >= SIZES.records * fleet.boards / 8  # of some days
    assert told.most_a_second <= told.requests


@settings(max_examples=25, deadline=None)
@given(fleets)
def test_what_is_not_read_again_costs_nothing(fleet: Fleet) -> None:
    fleet = replace(fleet, noting_s=0.0)  # of as many days
    whole, conditional, listed = (simulate(replace(fleet, reading=way), SIZES, Http()) for way in Reading)
    assert listed.requests <= conditional.requests
    assert conditional.bytes_a_day < whole.bytes_a_day


def test_boards_that_came_on_together_pull_apart() -> None:
    fleet = Fleet(boards=200, pushers=2, hours=1.0, away=0.0, together=True, apart=False, round_trip_s=0.0)
    at_once = simulate(fleet, SIZES, Http())
    apart = simulate(replace(fleet, apart=True), SIZES, Http())
    assert apart.most_a_second < at_once.most_a_second / 10


def test_notes_that_were_written_over_are_found_two_pulls_later() -> None:
    fleet = Fleet(boards=200, pushers=100, away=0.0, noting_s=60.0)
    noted, lost = simulate(replace(fleet, noting_s=0.0), SIZES, Http()), simulate(fleet, SIZES, Http())
    assert (noted.lost, lost.lost > 10) == (0, True)
    assert noted.all_s < 7 * HOUR < lost.all_s < 14 * HOUR


def test_turns_cost_as_much_for_each_board_however_many_there_are() -> None:
    few, many = (simulate(Fleet(boards=n, away=0.0), SIZES, Http()) for n in (300, 1200))
    assert many.requests_a_day / 1200 == pytest.approx(few.requests_a_day / 300, rel=0.05)
    assert many.requests_a_day < 1200 * (LOOKS + 5) * 4.5


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    board = tmp_path / "boards/ABC"
    board.mkdir(parents=True)
    files = {
        tmp_path / "hub.json": json.dumps({"boards": [{}, {}]}).encode(),
        tmp_path / "hub.json.minisig": b"s" * 30,
        board / "index.json": json.dumps(
            {
                "entries": [{"records": 3, "bytes": 50}, {"records": 4, "bytes": 60}],
                "spread": [{"records": 90, "bytes": 900}],
            }
        ).encode(),
        board / "index.json.minisig": b"s" * 31,
    }
    for path, data in files.items():
        path.write_bytes(data)
    found = Sizes.of(tmp_path)
    assert found.keyring == len(files[tmp_path / "hub.json"]) / 2
    assert (found.index_signature, found.count) == (31, 7)
    assert found.records == 110


def test_a_search_is_told_by_its_records(tmp_path: Path) -> None:
    """A pause between two sessions is no time of searching."""
    lines = [
        {"workload": "a", "created_s": 0.0, "finished_s": 1.0},
        {"workload": "a", "created_s": 2.0, "finished_s": 5.0},
        {"workload": "b", "created_s": 1000.0, "finished_s": 1004.0},
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Search.of(tmp_path / "r.jsonl") == Search(
        tasks=2, trials=3, seconds=4.0, hinted_s=pytest.approx(6.0)
    )
