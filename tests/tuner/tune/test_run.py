"""Whole tuning runs with real processes: faster and right in the end, whatever is killed on the way."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.machine import devices
from honed.machine.peaks import survey
from honed.runtime.execution.executor import load
from honed.tuner.tune.children import Extract, SearchChild
from honed.tuner.tune.session import SearchBudget
from honed.tuner.tune.task import TaskState
from tests.tuner import running
from tests.tuner.liars import broken_searcher
from tests.tuner.running import MEASURING, SEARCHING, Tuning

pytestmark = [pytest.mark.tvm, pytest.mark.opencl, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    if not devices.discover():
        pytest.skip("this machine has no OpenCL device")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_model(tmp_path_factory.mktemp("model") / "m.onnx")


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "records.sqlite"
    yield path
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def check_answers(path: Path) -> None:
    with load(path) as executor:
        np.testing.assert_allclose(executor.run({"x": running.given()})["y"], running.expected(), atol=1e-5)


def test_a_tuned_model_is_faster_and_answers_as_before(
    model: Path, records: Path, cache_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "tuned.honed"
    with Tuning(model, records, cache_dir, "--trials=6", f"--output={output}") as run:
        done = run.finish()
    assert run.process.returncode == 0
    assert done["event"] == "done"
    assert done["trials"] == 6
    assert {row["state"] for row in done["tasks"]} <= {"tuned", "skipped"}
    assert output.exists() == (done["output"] is not None)
    versions = rows(records, "SELECT why FROM versions ORDER BY version")
    assert versions[0] == ("default schedules",)
    assert len(versions) == 1 + output.exists()
    if output.exists():
        assert done["after_us"] < done["before_us"]
        check_answers(output)
    kept = rows(records, "SELECT state, outcome, yardstick_ratio FROM candidates")
    assert len(kept) == 6
    assert all(state != "in-flight" for state, _, _ in kept)
    assert all(ratio > 0 for _, outcome, ratio in kept if outcome == "right")


def test_killed_children_cost_a_candidate_and_not_the_run(
    model: Path, records: Path, cache_dir: Path
) -> None:
    """Both children are killed in mid-run; the reasons are recorded, and another run goes on from there."""
    with Tuning(model, records, cache_dir, "--trials=10") as run:
        trials = 0
        for event in run.reported():
            trials += event["event"] == "trial"
            if event["event"] == "trial" and trials in (2, 6):
                child = run.child(MEASURING if trials == 2 else SEARCHING)
                assert child is not None
                child.kill()
        assert run.process.wait() == 0
    done = run.events[-1]
    assert (done["event"], done["trials"], done["lost"]) == ("done", 10, 0)
    broke = [e["reason"] for e in run.events if e["event"] == "broke"]
    assert len(broke) == 1
    assert "signal SIGKILL" in broke[0]
    (dead,) = rows(records, "SELECT id, trace, reason, finished_s FROM candidates WHERE outcome = 'not-run'")
    assert "SIGKILL" in dead[2]

    with Tuning(model, records, cache_dir, "--trials=3") as run:
        assert run.finish()["trials"] == 3
    query = "SELECT id, trace, reason, finished_s FROM candidates WHERE outcome = 'not-run'"
    assert rows(records, query) == [dead]
    assert rows(records, "SELECT COUNT(*) FROM candidates") == [(13,)]


def test_an_interrupt_keeps_what_was_found(
    model: Path, records: Path, cache_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "tuned.honed"
    with Tuning(model, records, cache_dir, "--trials=1000", f"--output={output}") as run:
        for event in run.reported():
            if event["event"] == "trial" and event["outcome"] == "right":
                run.process.send_signal(signal.SIGINT)
                break
        done = run.finish()
    assert run.process.returncode == 0
    assert done["event"] == "done"
    assert 1 <= done["trials"] < 1000
    assert rows(records, "SELECT COUNT(*) FROM candidates WHERE state = 'in-flight'") == [(0,)]
    assert rows(records, "SELECT COUNT(*) FROM candidates") == [(done["trials"],)]
    if done["output"]:
        check_answers(output)


@pytest.mark.parametrize("how", ["dies", "hangs", "raises", "lowering-dies"])
def test_a_task_that_breaks_the_compiler_is_lost_alone(
    model: Path, records: Path, cache_dir: Path, how: str
) -> None:
    found = survey(None, cache_dir)
    events: list[dict[str, Any]] = []
    command = broken_searcher.command(how, "matmul")
    call = Extract(path=model, shapes={}, precision="auto")
    with (
        SearchChild(found.profile, records.with_suffix(".npz"), 0, command) as search,
        running.session(found.spec, found.profile, records, search, events.append) as session,
    ):
        session.run(lambda: search.find_tasks(call), SearchBudget(trials=3))
    by_name = {p.task.name: p for p in session.tasks}
    assert by_name["matmul"].stage is TaskState.FAILED
    why = {
        "dies": "SIGABRT",
        "hangs": f"more than {broken_searcher.HANGS_FOR:g} s",
        "raises": "cannot be replayed",
        "lowering-dies": "a process that lowers candidates ended",
    }
    assert why[how] in by_name["matmul"].reason
    assert by_name["matmul"].failures == {"compiler": 2}
    assert by_name["softmax"].stage is TaskState.TUNED
    assert by_name["softmax"].trials == 3
