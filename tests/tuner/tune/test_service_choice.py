"""Which model the tuner takes next, and what it remembers of those it had."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from honed.protocol.results import LatencyPoint
from honed.protocol.service import TimeSpent
from honed.tuner.service.choice import (
    FIRST_PASS_SECONDS,
    SLICE_SECONDS,
    PassPlan,
    TuningCandidate,
    TuningHistory,
    Unprofiled,
    after_failure,
    after_hints,
    after_pass,
    choose,
    worth_profiling,
)
from honed.tuner.service.view import TuningState, figures_in


def model(name: str, seconds: float = 0.0, obstacle: str = "", **known: object) -> TuningCandidate:
    return TuningCandidate(
        name=name,
        seconds=seconds,
        obstacle=obstacle,
        history=replace(TuningHistory(key="k"), **{"passes": 1, **known}),  # type: ignore[arg-type]
    )


def test_a_new_model_gets_a_short_pass_first() -> None:
    models = [model("used", 100.0), model("new", passes=0)]
    assert choose(models, 0.0) == PassPlan(name="new", seconds=FIRST_PASS_SECONDS)


def test_time_goes_where_most_can_be_won() -> None:
    models = [model("much", 100.0, headroom=0.1), model("less", 50.0, headroom=0.8), model("never")]
    assert choose(models, 0.0) == PassPlan(name="less", seconds=SLICE_SECONDS)


def test_each_kernel_counts_by_itself() -> None:
    """Half of the time of "one" could be won on the whole, but requests spend theirs where little is left."""
    shares = {"dense": 0.9, "softmax": 0.1}
    one = replace(model("one", 100.0, headroom=0.5, tasks=shares), tasks={"dense": 5.0, "softmax": 85.0})
    other = model("other", 40.0, headroom=0.5)
    assert choose([one, other], 0.0) == PassPlan(name="other", seconds=SLICE_SECONDS)
    turned = replace(one, tasks={"dense": 85.0, "softmax": 5.0})
    assert choose([turned, other], 0.0) == PassPlan(name="one", seconds=SLICE_SECONDS)
    never_timed = replace(one, tasks={"new": 90.0})
    assert choose([never_timed, other], 0.0) == PassPlan(name="one", seconds=SLICE_SECONDS)


def test_a_used_version_is_profiled_once() -> None:
    version, spent = Unprofiled("m", "a"), TimeSpent(seconds=1.0, tasks={}, profiled="")

    def curve(*medians: float) -> list[LatencyPoint]:
        return [LatencyPoint(time=0.0, version=1, count=9, us=us) for us in medians]

    fast, slow = curve(9e9, 2e5), curve(2e5, 2e6)
    assert worth_profiling(version, spent, fast)
    assert not worth_profiling(version, spent, slow), "requests would wait for too long"
    assert not worth_profiling(version, spent, [])
    assert not worth_profiling(version, replace(spent, seconds=0.0), fast)
    assert not worth_profiling(version, replace(spent, profiled="a"), fast)
    assert worth_profiling(version, replace(spent, profiled="before"), fast)


def test_models_never_used_come_last_but_come() -> None:
    assert choose([model("never"), model("used", 0.1)], 0.0) == PassPlan(name="used", seconds=SLICE_SECONDS)
    assert choose([model("never"), model("done", 9.0, finished=True)], 0.0) == PassPlan(
        name="never", seconds=SLICE_SECONDS
    )


def test_what_cannot_or_need_not_be_tuned_is_left() -> None:
    models = [model("pinned", 9.0, "version 2 is pinned"), model("done", 9.0, finished=True)]
    assert choose(models, 0.0) is None
    assert choose([], 0.0) is None


def test_a_failure_is_waited_out_longer_each_time() -> None:
    known, waits = TuningHistory(key="k"), []
    for _ in range(12):
        known = after_failure(known, "the device went away", 1000.0)
        waits.append(known.retry - 1000.0)
    assert waits[:3] == [300.0, 600.0, 1200.0]
    assert waits[-1] == 86_400.0
    assert choose([TuningCandidate(name="m", seconds=1.0, obstacle="", history=known)], 1001.0) is None
    again = after_pass(known, finished=False, headroom=0.5)
    assert choose([TuningCandidate(name="m", seconds=1.0, obstacle="", history=again)], 1001.0) is not None


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1), st.integers(0, 3), st.booleans()), max_size=8))
def test_whoever_is_chosen_may_be_tuned(models: list[tuple[float, float, int, bool]]) -> None:
    wanted = [
        model(str(n), seconds, headroom=headroom, passes=passes, finished=finished)
        for n, (seconds, headroom, passes, finished) in enumerate(models)
    ]
    plan = choose(wanted, 0.0)
    ready = [m for m in wanted if not m.history.finished]
    assert (plan is None) == (not ready)
    if plan is not None:
        assert plan.name in {m.name for m in ready}
        assert not any(m.history.passes == 0 for m in ready) or plan.seconds == FIRST_PASS_SECONDS


def test_what_is_known_outlasts_the_tuner_and_holds_for_its_setup_alone(tmp_path: Path) -> None:
    path = tmp_path / "tuner.json"
    known = after_pass(TuningHistory(key="source device driver"), finished=True, headroom=0.2)
    TuningState(path).put("m", known)
    assert TuningState(path).get("m", "source device driver") == known
    assert TuningState(path).get("m", "source device driver 2") == TuningHistory(key="source device driver 2")
    plain = json.loads(path.read_text())
    del plain["models"]["m"]["tasks"]  # as it was written before tasks were told apart
    path.write_text(json.dumps(plain))
    assert TuningState(path).get("m", "source device driver") == known
    path.write_text("{")
    assert TuningState(path).get("m", "source device driver") == TuningHistory(key="source device driver")


def test_headroom_is_a_share() -> None:
    assert after_pass(TuningHistory(key="k"), finished=False, headroom=7.0).headroom == 1.0
    assert isinstance(after_pass(TuningHistory(key="k"), finished=False, headroom=0.5), TuningHistory)


def test_records_that_there_are_not_and_those_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    assert figures_in(path) is None
    path.mkdir()
    told = figures_in(path)
    assert told is not None
    assert not told.trials
    assert "cannot be read" in told.reason


def test_what_a_hub_brings_is_a_reason_to_tune_once() -> None:
    """A model that cannot be tuned at all is not asked for again and again."""
    done = after_pass(TuningHistory(key="k"), finished=True, headroom=0.0)
    again = after_hints(done, 7)
    assert not again.finished
    ended = after_pass(again, finished=True, headroom=0.0, hints=again.hints)
    assert after_hints(ended, 7).finished
    assert not after_hints(ended, 8).finished
    assert after_hints(after_failure(again, "no device", 0.0), 7).hints == 7
