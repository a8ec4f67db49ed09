"""How a tuning run is watched: totals over seconds and trials, and what comes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gains.__main__ import without_priors
from benchmarks.gains.runs import Kind, Moment, Watch, within


def rows(dense_us: float, conv_us: float) -> list[dict[str, Any]]:
    return [
        {"task": "a", "name": "fused_matmul1_add", "weight": 2, "best_us": dense_us},
        {"task": "b", "name": "fused_conv2d_relu", "weight": 1, "best_us": conv_us},
        {"task": "c", "name": "reshape", "weight": 9, "best_us": None},
    ]


def trial(task: str, best_us: float | None) -> dict[str, Any]:
    return {"event": "trial", "task": task, "best_us": best_us}


@pytest.fixture
def watch() -> Watch:
    found = Watch()
    for seconds, event in (
        (10.0, {"event": "tasks", "tasks": rows(100.0, 50.0)}),
        (11.0, trial("a", 60.0)),
        (12.0, trial("a", 60.0)),
        (14.0, {"event": "round", "task": "a", "tasks": rows(60.0, 50.0)}),
        (15.0, trial("b", 41.0)),
        (16.0, trial("b", 40.0)),
        (24.0, {"event": "round", "task": "b", "tasks": rows(60.0, 40.0)}),
        (25.0, {"event": "done"}),
    ):
        found.heard(event, seconds)
    return found


def test_the_total_is_followed_trial_by_trial(watch: Watch) -> None:
    assert watch.run.moments[0] == Moment(10.0, 0, 250.0)
    assert [one.total_us for one in watch.run.moments] == [250.0, 170.0, 170.0, 170.0, 161.0, 160.0, 160.0]
    assert watch.run.near == Moment(15.0, 3, 161.0), "90 % of 90 us are won"
    assert watch.run.below(100.0) is None


def test_rounds_are_told_apart_by_what_their_task_is(watch: Watch) -> None:
    assert watch.run.rate(Kind.PRODUCT) == 2 / 4.0
    assert watch.run.rate(Kind.CONVOLUTION) == 2 / 10.0
    assert watch.run.rate(Kind.OTHER) is None


def test_runs_are_compared_by_what_the_best_of_them_won(watch: Watch) -> None:
    other = Watch()
    other.heard({"event": "tasks", "tasks": rows(40.0, 70.0)}, 5.0)
    assert within([watch.run, other.run]) == pytest.approx(250 - 0.9 * 100)


def test_an_installation_without_priors_has_none(tmp_path: Path) -> None:
    path = os.pathsep.join((str(without_priors(tmp_path)), *sys.path))
    code = "from honed.tuner.search.prior import prior_of; print(prior_of('cpu'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None\n"
