"""Which of two forms is taken, and what follows for a session's tasks, without devices or clocks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.jobs.events import FusionChoice
from honed.tuner.compiler.fusion import LESS, FusionAlternatives, describe, other
from honed.tuner.tune import task
from honed.tuner.tune.task import TaskProgress, TaskState, judge, latency, next_task

from .test_task import timed

KEYS = ("one", "q", "s", "v")
_SECONDS = st.floats(1e-6, 1e-2)
_TIMES = st.dictionaries(st.sampled_from(KEYS), _SECONDS)
_FORMS: st.SearchStrategy[FusionChoice] = st.sampled_from(("joined", "apart"))


def contest(expected: FusionChoice = "joined", calls: int = 9, launch: float = 0.0) -> FusionAlternatives:
    return FusionAlternatives(
        name="qsv", fused="one", unfused=KEYS[1:], calls=calls, launch=launch, expected=expected
    )


_CONTESTS = st.builds(contest, _FORMS, st.integers(1, 9), st.floats(0.0, 1e-4))


@given(_CONTESTS, _TIMES)
def test_without_all_times_it_is_the_one_expected(
    one: FusionAlternatives, times: Mapping[str, float]
) -> None:
    assert one.choose({}) == one.expected
    if times.keys() != set(KEYS):
        assert one.choose(times) == one.expected
    assert one.choose({**times, "another task": 1.0}) == one.choose(times)


@given(_CONTESTS, st.fixed_dictionaries(dict.fromkeys(KEYS, _SECONDS)))
def test_the_form_taken_is_the_faster_one_or_as_good_as_that(
    one: FusionAlternatives, times: Mapping[str, float]
) -> None:
    taken = one.choose(times)
    mine, theirs = one.time(taken, times), one.time(other(taken), times)
    assert mine is not None
    assert theirs is not None
    assert mine <= theirs / LESS
    if taken != one.expected:
        assert mine < LESS * theirs


@given(
    _CONTESTS, st.fixed_dictionaries(dict.fromkeys(KEYS, _SECONDS)), st.sampled_from(KEYS), st.floats(0.1, 1)
)
def test_a_form_taken_stays_so_when_its_kernels_get_faster(
    one: FusionAlternatives, times: Mapping[str, float], key: str, share: float
) -> None:
    taken = one.choose(times)
    if key in one.keys(taken):
        assert one.choose({**times, key: share * times[key]}) == taken


def test_each_launch_costs_what_the_family_says() -> None:
    times = {"one": 100e-6, "q": 30e-6, "s": 30e-6, "v": 30e-6}
    assert contest().choose(times) == "apart"
    assert contest(launch=10e-6).choose(times) == "joined"
    assert contest("apart", launch=10e-6).choose(times) == "joined"


def test_both_times_are_told_of_what_is_not_as_expected() -> None:
    times = {"one": 100e-6, "q": 30e-6, "s": 20e-6, "v": 30e-6}
    assert describe([contest()], {"one": 1.0}) == ()
    (sentence,) = describe([contest()], times)
    why = "as measured, several kernels are taken in the place of one"
    assert sentence == f"{why}: qsv (100 us in one, 80 us in 3)"
    assert describe([contest("apart")], times) == ()
    (sentence,) = describe([contest("apart")], {**times, "v": 1e-3})
    why = "as measured, one kernel is taken in the place of several"
    assert sentence == f"{why}: qsv (100 us in one, 1050 us in 3)"


def _tasks(one: float, part: float, calls: int = 9, roofline: float = 1e-6) -> list[TaskProgress]:
    """As a model is first served: joined, and a part of another weight elsewhere."""
    weights = {"one": calls, "q": 0, "s": 2, "v": 0}
    return [
        timed(key, one if key == "one" else part, weight, roofline=roofline)
        for key, weight in weights.items()
    ]


def _weights(tasks: list[TaskProgress]) -> dict[str, int]:
    return {p.task.key: p.weight for p in tasks}


def test_weights_are_of_the_form_taken_and_change_with_it() -> None:
    tasks = _tasks(100e-6, 40e-6)
    task.settle_forms(tasks, [contest()])
    assert _weights(tasks) == {"one": 9, "q": 0, "s": 2, "v": 0}
    assert {p.task.key: p.alternative_runs for p in tasks} == {"one": 0, "q": 9, "s": 9, "v": 9}
    before = latency(tasks).now_us
    for p in tasks[1:]:
        p.record_time(10e-6, "t")
    task.settle_forms(tasks, [contest()])
    assert _weights(tasks) == {"one": 0, "q": 9, "s": 11, "v": 9}
    assert {p.task.key: p.alternative_runs for p in tasks} == {"one": 9, "q": 0, "s": 0, "v": 0}
    assert latency(tasks).now_us == pytest.approx(29 * 10)
    assert latency(tasks).before_us == pytest.approx(before)
    tasks[0].record_time(20e-6, "t")
    task.settle_forms(tasks, [contest()])
    assert _weights(tasks) == {"one": 9, "q": 0, "s": 2, "v": 0}


def test_a_function_that_a_form_calls_twice_counts_twice() -> None:
    twice = FusionAlternatives(
        name="n", fused="one", unfused=("q", "s", "q"), calls=3, launch=0.0, expected="joined"
    )
    tasks = _tasks(100e-6, 10e-6, calls=3)
    task.settle_forms(tasks, [twice])
    assert _weights(tasks) == {"one": 0, "q": 6, "s": 5, "v": 0}


def test_a_rival_has_its_turns_when_little_is_left_to_win() -> None:
    tasks = _tasks(100e-6, 40e-6)
    task.settle_forms(tasks, [contest()])
    judge(tasks)
    chosen = []
    while (one := next_task(tasks)) is not None:
        chosen.append(one.task.key)
        one.end_round(one.best, 1.0)
        judge(tasks)
    assert chosen[0] == "one"
    assert {"q", "v"} <= set(chosen)
    assert chosen.count("q") < chosen.count("one")


def test_a_form_that_no_schedule_makes_faster_has_no_turns_and_says_why() -> None:
    tasks = _tasks(100e-6, 40e-6, roofline=33e-6)
    task.settle_forms(tasks, [contest()])
    judge(tasks)
    assert {p.task.key: p.alternative_runs for p in tasks} == {"one": 0, "q": 0, "s": 0, "v": 0}
    skipped = {p.task.key for p in tasks if p.stage is TaskState.SKIPPED and "not taken" in p.reason}
    assert skipped == {"q", "v"}
    task.settle_forms(tasks, [contest(launch=-2e-6)])  # as if less were known of what it takes
    judge(tasks)
    assert all(p.stage is TaskState.TUNING for p in tasks), "skipped for as long as it cannot win"


def test_both_forms_are_shown() -> None:
    tasks = _tasks(100e-6, 40e-6)
    (row,) = task.two_forms_rows(tasks, [contest()])
    assert (row.taken, row.calls, row.joined, row.apart) == ("joined", 9, "one", ("q", "s", "v"))
    assert row.joined_us == pytest.approx(100)
    assert row.apart_us == pytest.approx(120)
    tasks[1].best = None
    assert task.two_forms_rows(tasks, [contest()])[0].apart_us is None


def test_what_is_served_in_the_slower_form_is_known() -> None:
    tasks = _tasks(100e-6, 10e-6)
    forms = task.two_forms_rows(tasks, [contest()])
    assert forms[0].taken == "apart"
    assert task.loss_by_choices(forms, {"one", "s"}) == pytest.approx(9 * 70)
    assert task.loss_by_choices(forms, {"q", "s", "v"}) == 0
