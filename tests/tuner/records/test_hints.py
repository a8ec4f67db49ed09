"""Records of a hub in the records: what is tried of them, how often, and when a source is set aside."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.hub import layout
from honed.protocol.params import HintFigures
from honed.runtime.compiled.model import SearchStrategy
from honed.tuner.records import store
from honed.tuner.records.exchange import export_jsonl, import_jsonl, own
from honed.tuner.records.rows import MeasurementSetup, NewCandidate, Verdict
from honed.tuner.records.store import Records
from tests.tuner.records.test_records import (
    FAULT,
    NEWER_DRIVER,
    OTHER_DEVICE,
    SETUP,
    WRONG,
    add,
    right,
    trace,
)


class Clock:
    now = 1.8e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def here(tmp_path: Path, clock: Clock) -> Iterator[Records]:
    with Records.open(tmp_path / "here.db", measured_by="board B") as records:
        records._clock = clock
        yield records


def measured(folder: Path, *candidates: tuple[int, Verdict], setup: MeasurementSetup = SETUP) -> list[Any]:
    """What a board that measured these exports."""
    with Records.open(folder / f"{len(list(folder.iterdir()))}.db", measured_by="secret host") as records:
        for number, verdict in candidates:
            add(records, number, verdict, setup=setup)
        file = io.BytesIO()
        export_jsonl(records, file, setup)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def take_in(records: Records, lines: list[Any], name: str = "attic") -> Any:
    """Import them as a pull does."""
    packed = layout.pack_records([layout.shareable_part(line) for line in lines])
    given = b"".join(layout.hint_of(line, name)[0] for line in layout.unpack_records(packed) if line)
    return import_jsonl(records, io.BytesIO(given), SETUP)


def tried(records: Records, number: int, verdict: Verdict, setup: MeasurementSetup = SETUP) -> None:
    new = NewCandidate(workload="dense", setup=setup, trace=trace(number), way=SearchStrategy.REVALIDATED)
    records.finish(records.begin(new), verdict)


def waiting(records: Records, setup: MeasurementSetup = SETUP, **options: int) -> list[str]:
    return [found.trace for found in records.hints("dense", setup, **options)]


def test_a_hint_is_no_record_of_ours_until_it_was_tried(here: Records, tmp_path: Path) -> None:
    done = take_in(here, measured(tmp_path, (1, right(2.0)), (2, right(1.0)), (3, FAULT), (4, WRONG)))
    assert (done.added, done.refused) == (4, ())
    assert here.best("dense", SETUP) is None
    assert here.distil(SETUP) == []
    assert here.stale("dense", SETUP) == []
    assert waiting(here) == [trace(2), trace(1)]
    assert here.hints("dense", OTHER_DEVICE) == []
    assert not here.may_run(
        SETUP, "dense", here.list_quarantined(SETUP)[0].trace_sha256
    )  # what faulted there
    tried(here, 2, right(1.1))
    assert waiting(here) == [trace(1)]
    best = here.best("dense", SETUP)
    assert best is not None
    assert best.trace == trace(2)
    assert here.figures().hints == {"attic": HintFigures(taken=4, tried=1, failed=0, aside=False)}


def test_what_another_driver_measured_is_tried_after_this_one_s(here: Records, tmp_path: Path) -> None:
    take_in(
        here, measured(tmp_path, (1, right(2.0))) + measured(tmp_path, (2, right(1.0)), setup=NEWER_DRIVER)
    )
    assert waiting(here) == [trace(1), trace(2)]
    assert waiting(here, NEWER_DRIVER) == [trace(2), trace(1)]


def test_sources_take_turns(here: Records, tmp_path: Path) -> None:
    flood = [(number, right(0.001 * number)) for number in range(10, 30)]
    take_in(here, measured(tmp_path, *flood), "flood")
    take_in(here, measured(tmp_path, (1, right(2.0)), (10, right(3.0))), "honest")
    assert waiting(here) == [trace(10), trace(1), trace(11), trace(12)]


def test_no_more_are_tried_in_a_day_than_allowed(here: Records, tmp_path: Path, clock: Clock) -> None:
    take_in(here, measured(tmp_path, *((number, right(number)) for number in range(1, 9))))
    assert len(waiting(here, per_task=3)) == 3
    for number in (1, 2):
        tried(here, number, right(number))
    assert waiting(here, per_task=3) == [trace(3)]
    assert waiting(here, per_task=2) == waiting(here, per_task=0) == []
    clock.now += store.DAY + 1
    assert waiting(here, per_task=3) == [trace(3), trace(4), trace(5)]


@pytest.mark.parametrize("came_of_it", [WRONG, right(100.0)], ids=["wrong", "far slower than claimed"])
def test_a_source_whose_hints_fail_is_set_aside(
    here: Records, tmp_path: Path, clock: Clock, came_of_it: Verdict
) -> None:
    take_in(here, measured(tmp_path, *((number, right(0.01 * number)) for number in range(1, 9))), "liar")
    take_in(here, measured(tmp_path, (50, right(5.0))), "honest")
    for number in (1, 2):
        tried(here, number, came_of_it)
    assert not here.hint_sources()["liar"].aside
    tried(here, 3, came_of_it)
    assert here.hint_sources()["liar"] == HintFigures(taken=8, tried=3, failed=3, aside=True)
    clock.now += store.DAY + 1
    assert waiting(here) == [trace(50)]
    clock.now += store.FAILURES_COUNT
    assert trace(4) in waiting(here)


def test_another_driver_s_time_is_no_promise(here: Records, tmp_path: Path) -> None:
    take_in(here, measured(tmp_path, *((n, right(0.01)) for n in range(3)), setup=NEWER_DRIVER))
    for number in range(3):
        tried(here, number, right(100.0))
    assert here.hint_sources()["attic"].failed == 0


def test_what_was_refused_before_it_ran_counts(here: Records, tmp_path: Path) -> None:
    take_in(here, measured(tmp_path, (1, right(1.0))))
    new = NewCandidate(workload="dense", setup=SETUP, trace=trace(1), way=SearchStrategy.REVALIDATED)
    here.refuse(new, "it does not fit the task")
    assert waiting(here) == []
    assert here.hint_sources()["attic"].failed == 1


def test_what_we_found_ourselves_does_not_speak_for_a_source(here: Records, tmp_path: Path) -> None:
    take_in(here, measured(tmp_path, (1, right(1.0))))
    add(here, 1, WRONG)
    assert here.hint_sources()["attic"].tried == 0
    assert waiting(here) == []


def test_old_ones_of_a_source_go(here: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_HINTS", 3)
    take_in(here, measured(tmp_path, (9, right(1.0))), "other")
    take_in(here, measured(tmp_path, *((number, right(1.0)) for number in range(5))))
    assert {name: each.taken for name, each in here.hint_sources().items()} == {"attic": 3, "other": 1}


@given(st.integers(0, 100), st.integers(0, 100))
def test_nobody_is_set_aside_for_little(failed: int, more: int) -> None:
    told = store.hint_figures(0, failed + more, failed)
    assert told.aside == (failed >= 3 and 5 * failed > failed + more)


def test_hints_of_another_board_stay_off_the_next_export(here: Records, tmp_path: Path) -> None:
    from honed.hub import pushing

    take_in(here, measured(tmp_path, (1, right(1.0))))
    tried(here, 1, right(1.2))
    file = io.BytesIO()
    for setup in here.setups():
        export_jsonl(here, file, setup, own)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    ((_, kept),) = pushing._files(lines)
    assert [line["timing"]["median_s"] for line in kept] == [1.2e-3]
    assert dataclasses.replace(SETUP).compiler == kept[0]["compiler"]


def test_of_all_sources_together_no_more_are_kept(
    here: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_HINTS_IN_ALL", 3)
    add(here, 99, right(1.0))
    for number in range(5):
        take_in(here, measured(tmp_path, (number, right(1.0))), f"source{number}")
    assert list(here.hint_sources()) == ["source2", "source3", "source4"]
    assert here.best("dense", SETUP) is not None, "what was measured here is no hint"


def test_figures_of_the_sources_that_matter_are_told() -> None:
    worth = {
        f"s{n}": HintFigures(taken=n, tried=int(n == 3), failed=0, aside=n == 7)
        for n in range(store.MOST_TOLD + 50)
    }
    kept = store.foremost(worth)
    assert len(kept) == store.MOST_TOLD
    assert {"s3", "s7", f"s{store.MOST_TOLD + 49}"} <= kept.keys()
    assert store.foremost({}) == {}
