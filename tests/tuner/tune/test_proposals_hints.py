"""What a hub's records have the searching child do: one at a time, and never again what broke it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.runtime.compiled.model import SearchStrategy
from tests.tuner.records.test_records import SETUP, add, right, trace

pytest.importorskip("tvm")
from honed.tuner.measure.candidate import Candidate
from honed.tuner.records.store import Records
from honed.tuner.tune.children import Proposals, ProposedCandidate, SearchChild, SearchFailed
from honed.tuner.tune.task import TaskProgress, TuningTask
from tests.tuner.records.test_hints import measured, take_in

TASK = TuningTask(key="dense", name="dense", weight=1, flops=1, bytes=1, dtype="float32", opaque="")


class Child:
    """A searching child that breaks at one trace, does not know another, and cannot lower a third."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def load(self, task: str) -> Any:
        return SimpleNamespace(fresh=False, workload=None)

    def replay(self, task: str, traces: Sequence[str]) -> list[ProposedCandidate]:
        self.asked.append(list(traces))
        (text,) = traces
        match json.loads(text)[1]:
            case 1:
                raise SearchFailed("its process died")
            case 2:
                return []
            case 3:
                return [ProposedCandidate(text, text, None, None, "no device has so many registers")]
        return [ProposedCandidate(text, text, None, cast("Candidate", object()), "")]


def test_hints_that_break_or_do_not_fit_are_noted_and_left(tmp_path: Path) -> None:
    child = Child()
    with Records.open(tmp_path / "here.db") as records:
        (tmp_path / "theirs").mkdir()
        take_in(records, measured(tmp_path / "theirs", *((n, right(n)) for n in (1, 2, 3, 4))))
        proposals = Proposals(cast("SearchChild", child), records, SETUP, ahead=False)
        progress = TaskProgress(task=TASK, roofline=1e-9)
        assert proposals.has_hints(TASK)
        proposed = proposals.next(progress)
        assert ([entry.trace for entry in proposed.entries], proposed.way) == (
            [trace(4)],
            SearchStrategy.REVALIDATED,
        )
        reasons = [c.reason for c in records.history("dense", SETUP)]
        assert reasons == ["its process died", "it does not fit the task", "no device has so many registers"]
        assert records.hint_sources()["attic"].failed == 3
        assert records.hint_sources()["attic"].aside
        assert not proposals.has_hints(TASK)
    assert [len(traces) for traces in child.asked] == [1, 1, 1, 1]


def test_what_an_own_driver_knew_comes_along(tmp_path: Path) -> None:
    from tests.tuner.records.test_records import NEWER_DRIVER

    child = Child()
    with Records.open(tmp_path / "here.db") as records:
        add(records, 5, right(1.0), setup=NEWER_DRIVER)
        (tmp_path / "theirs").mkdir()
        take_in(records, measured(tmp_path / "theirs", (4, right(1.0))))
        proposals = Proposals(cast("SearchChild", child), records, SETUP, ahead=False)
        proposed = proposals.next(TaskProgress(task=TASK, roofline=1e-9))
    assert [entry.trace for entry in proposed.entries] == [trace(4), trace(5)]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_search_that_is_yet_to_begin_is_told_what_was_measured(tmp_path: Path, fresh: bool) -> None:
    known: list[tuple[str, float | None]] = []
    search = SimpleNamespace(
        load=lambda _task: SimpleNamespace(fresh=fresh),
        begin=lambda _task, measured, _related, _round: known.extend(measured),
        collect=lambda: None,
    )
    with Records.open(tmp_path / "here.db") as records:
        add(records, 4, right(1.0))
        Proposals(cast("SearchChild", search), records, SETUP, ahead=False).next(
            TaskProgress(task=TASK, roofline=1e-9, rounds=1)
        )
    assert known == ([(trace(4), 1e-3)] if fresh else [])
