"""The simulation of a fleet and its hub, whose figures docs/measurements.md has."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.fleet.search import Search
from benchmarks.fleet.simulate import HOUR, Fleet, Reading, simulate
from benchmarks.fleet.sizes import Http, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = Sizes(keyring=100, keyring_signature=300, index=500, index_signature=300, records=10_000, count=36)
fleets = st.builds(
    Fleet,
    boards=st.integers(2, 40),
    pushers=st.integers(1, 2),
    hours=st.floats(0.5, 24),
    jitter=st.floats(0, 0.5),
    away=st.floats(0, 0.5),
    together=st.booleans(),
    reading=st.sampled_from(Reading),
    seed=st.integers(0, 1000),
)


@settings(max_examples=50, deadline=None)
@given(fleets)
def test_all_boards_have_all_in_the_end(fleet: Fleet) -> None:
    told = simulate(fleet, SIZES, Http())
    assert told == simulate(fleet, SIZES, Http()), "the same for the same seed"
    assert 0 <= told.half_s <= told.all_s
    assert told.on_s <= told.all_s <= 24 * HOUR + 2 * fleet.hours * HOUR * (1 + fleet.jitter)
    assert told.bytes_a_day >= SIZES.records * fleet.boards / 4  # of some three days
    assert told.most_a_second <= told.requests


@settings(max_examples=25, deadline=None)
@given(fleets)
def test_what_is_not_read_again_costs_nothing(fleet: Fleet) -> None:
    whole, conditional, listed = (simulate(replace(fleet, reading=way), SIZES, Http()) for way in Reading)
    assert listed.requests <= conditional.requests
    assert conditional.bytes_a_day < whole.bytes_a_day


def test_jitter_parts_boards_that_began_together() -> None:
    fleet = Fleet(boards=200, pushers=2, hours=1.0, away=0.0, together=True, jitter=0.0, round_trip_s=0.0)
    step = simulate(fleet, SIZES, Http())
    apart = simulate(replace(fleet, together=False, jitter=0.1), SIZES, Http())
    assert apart.most_a_second < step.most_a_second / 2


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    board = tmp_path / "boards/ABC"
    board.mkdir(parents=True)
    files = {
        tmp_path / "hub.json": json.dumps({"boards": [{}, {}]}).encode(),
        tmp_path / "hub.json.minisig": b"s" * 30,
        board / "index.json": json.dumps({"entries": [{"records": 3}, {"records": 4}]}).encode(),
        board / "index.json.minisig": b"s" * 31,
        board / "1.jsonl.gz": gzip.compress(b"{}\n" * 7),
    }
    for path, data in files.items():
        path.write_bytes(data)
    found = Sizes.of(tmp_path)
    assert found.keyring == len(files[tmp_path / "hub.json"]) / 2
    assert (found.index_signature, found.count) == (31, 7)
    assert found.records == len(files[board / "1.jsonl.gz"])


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
