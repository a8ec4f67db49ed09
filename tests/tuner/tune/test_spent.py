"""Where a search's seconds go, and what may run beside what: values, without clocks."""

from __future__ import annotations

import pytest

from honed.jobs.events import Spent
from honed.machine.families import FAMILIES
from honed.tuner.tune.session import sharing
from honed.tuner.tune.trials import on_candidate


def test_a_candidates_seconds_are_told_apart_and_none_is_lost() -> None:
    phases = {"start": 0.01, "build": 0.25, "host": 0.02, "first": 0.5, "run": 0.03, "time": 0.125}
    assert on_candidate(phases, 1.0) == Spent(build=0.75, check=0.125, measure=0.125)


def test_rounds_add_up() -> None:
    one = Spent(search=1.0, build=2.0, check=3.0, measure=4.0)
    more = Spent(search=0.50001)
    assert (one + one + more).round_times() == Spent(search=2.5, build=4.0, check=6.0, measure=8.0)


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_nothing_runs_ahead_beside_a_device_that_is_all_of_the_processor(cores: int) -> None:
    assert not sharing(FAMILIES["cpu"], cores).ahead
    assert sharing(FAMILIES["cpu"], cores).builders == sharing(FAMILIES["cpu"], cores).threads == cores


def test_one_thread_searches_beside_a_processor_with_cores_to_spare() -> None:
    assert sharing(FAMILIES["cpu"], 8).ahead
    assert sharing(FAMILIES["cpu"], 8).threads == 1


@pytest.mark.parametrize("family", ["mali", "gpu"])
@pytest.mark.parametrize("cores", [1, 2, 8, 64])
def test_beside_a_gpu_a_core_is_left_to_feed_it(family: str, cores: int) -> None:
    found = sharing(FAMILIES[family], cores)
    assert found.ahead
    assert 1 <= found.threads <= max(1, cores - 1)
    assert found.builders <= max(1, cores - 2)
    assert family != "mali" or not found.builders
