"""What to tune next and when to stop, without devices or clocks."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.jobs.events import Estimate
from honed.machine.profile import DevicePeaks, raise_peaks
from honed.tuner.tune.task import (
    TaskProgress,
    TaskState,
    TuningTask,
    finish,
    judge,
    latency,
    likely_next,
    next_task,
)

PEAKS = DevicePeaks(fp32_gflops=100.0, fp16_gflops=None, bandwidth_gbs=10.0, launch_us=1.0)


def task(
    key: str = "k", weight: int = 1, flops: int = 0, nbytes: int = 0, dtype: str = "float32"
) -> TuningTask:
    return TuningTask(key=key, name=key, weight=weight, flops=flops, bytes=nbytes, dtype=dtype, opaque="")


def timed(key: str, default: float, weight: int = 1, roofline: float = 1e-6) -> TaskProgress:
    progress = TaskProgress(task=task(key, weight), roofline=roofline, default=default)
    progress.record_time(default, None)
    return progress


def test_the_roofline_is_the_slower_of_work_and_traffic_and_a_launch() -> None:
    assert task(flops=10**9).roofline(PEAKS) == pytest.approx(10e-3 + 1e-6)
    assert task(nbytes=10**9).roofline(PEAKS) == pytest.approx(100e-3 + 1e-6)


def test_the_device_s_own_time_of_an_empty_kernel_counts_where_it_is_known() -> None:
    alone = replace(PEAKS, empty_us=0.25)
    assert task(flops=10**6).roofline(alone) == pytest.approx(10e-6 + 0.25e-6)


def test_half_precision_has_its_own_peak_where_there_is_one() -> None:
    peaks = DevicePeaks(fp32_gflops=100.0, fp16_gflops=200.0, bandwidth_gbs=10.0, launch_us=0.0)
    half = task(flops=10**9, dtype="float16")
    assert half.roofline(peaks) == pytest.approx(5e-3)
    assert half.roofline(PEAKS) == pytest.approx(10e-3 + 1e-6)


def test_caches_are_faster_than_memory() -> None:
    peaks = replace(PEAKS, caches_gbs=((1 << 16, 100.0), (1 << 20, 50.0)), launch_us=0.0)
    assert task(nbytes=1 << 20).roofline(peaks) == pytest.approx((1 << 20) / 50e9)
    assert task(nbytes=1 << 19).roofline(peaks) == pytest.approx((1 << 19) / 100e9)
    assert task(nbytes=1 << 30).roofline(peaks) == pytest.approx((1 << 30) / 10e9)
    assert task(nbytes=1 << 20).roofline(peaks, 80e9) == pytest.approx((1 << 20) / 80e9)


def test_peaks_of_a_busy_machine_are_known_from_below() -> None:
    one = task(flops=10**9, nbytes=8)
    peaks = replace(PEAKS, launch_us=0.0)
    assert one.roofline(replace(peaks, busy=0.05)) == one.roofline(peaks)
    assert one.roofline(replace(peaks, busy=0.5)) == pytest.approx(one.roofline(peaks) / 1.25)


@pytest.mark.parametrize(
    ("dtype", "flops", "nbytes"), [("float32", 10**9, 8), ("float16", 10**9, 8), ("float32", 8, 1 << 20)]
)
def test_a_task_whose_kernel_raised_the_peak_is_not_at_its_roofline(
    dtype: str, flops: int, nbytes: int
) -> None:
    """Else the first record would end the search for the next."""
    peaks = replace(PEAKS, fp16_gflops=200.0, launch_us=0.0)
    one = task("k", flops=flops, nbytes=nbytes, dtype=dtype)
    best = one.roofline(peaks) / 1.5
    raised = raise_peaks(peaks, flops, nbytes, best, half=dtype == "float16")
    progress = TaskProgress(task=one, roofline=one.roofline(raised), default=2 * best)
    progress.record_time(best, "t")
    assert not progress.beyond
    assert progress.expected_gain > 0
    other = replace(raised, raised=())
    progress.roofline = one.roofline(other)
    assert progress.beyond, "it is, where a benchmark has reached that"


def test_small_tasks_and_those_at_their_roofline_are_skipped_with_reasons() -> None:
    tasks = [timed("big", 1.0), timed("small", 1e-4), timed("full", 0.1, roofline=0.095)]
    judge(tasks)
    assert [p.stage for p in tasks] == [TaskState.TUNING, TaskState.SKIPPED, TaskState.SKIPPED]
    assert "too small" in tasks[1].reason
    assert "roofline" in tasks[2].reason


def test_what_was_too_small_comes_to_matter_when_the_rest_is_faster() -> None:
    big, small = timed("big", 1.0), timed("small", 1e-3)
    judge([big, small])
    assert small.stage is TaskState.SKIPPED
    big.record_time(0.01, "t")
    big.end_round(1.0, 1.0)
    judge([big, small])
    assert (big.stage, small.stage, small.reason) == (TaskState.TUNING, TaskState.TUNING, "")


def test_a_task_that_is_worth_less_per_second_is_still_worth_it() -> None:
    quick, slow = timed("quick", 0.01), timed("slow", 1.0)
    quick.round_seconds, slow.round_seconds = 1e-3, 1000.0
    quick.rate = 0.01
    assert next_task([quick, slow]) is slow


def test_the_next_round_goes_to_the_greatest_gain_per_second() -> None:
    cheap, dear = timed("cheap", 0.010), timed("dear", 0.012)
    cheap.round_seconds, dear.round_seconds = 1.0, 10.0
    assert next_task([cheap, dear]) is cheap


def test_weight_counts() -> None:
    once, often = timed("once", 0.010), timed("often", 0.002, weight=36)
    assert next_task([once, often]) is often


def test_a_task_that_stopped_improving_is_left_for_others() -> None:
    stale, fresh = timed("stale", 1.0), timed("fresh", 0.5)
    for _ in range(6):
        stale.end_round(1.0, 10.0)
    assert next_task([stale, fresh]) is fresh


def test_it_stops_when_nothing_is_worth_it() -> None:
    only = timed("only", 1.0)
    for _ in range(12):
        only.end_round(1.0, 10.0)
    assert next_task([only]) is None


def test_nothing_is_expected_below_the_roofline() -> None:
    assert timed("full", 0.1, roofline=0.1).expected_gain == 0.0


def test_finishing_gives_every_task_a_stage_and_a_reason() -> None:
    tried, waiting, lost = timed("tried", 1.0), timed("waiting", 1.0), timed("lost", 1.0)
    tried.trials = 1
    tried.end_round(1.0, 1.0)
    lost.lose("the compiler ended: signal SIGSEGV")
    unworthy = timed("unworthy", 1.0)
    finish([unworthy], cut=False)
    assert "would win less than 0.2 %" in unworthy.reason
    finish([tried, waiting, lost], cut=True)
    assert [p.stage for p in (tried, waiting, lost)] == [TaskState.TUNED, TaskState.SKIPPED, TaskState.FAILED]
    assert waiting.reason
    assert lost.reason


def test_latency_is_weighted() -> None:
    one, two = timed("one", 1e-3, weight=2), timed("two", 1e-3)
    one.record_time(5e-4, "trace")
    assert latency([one, two]) == Estimate(before_us=pytest.approx(3000.0), now_us=pytest.approx(2000.0))


def test_a_task_of_which_nothing_could_be_tried_says_why() -> None:
    filtered, alone = timed("filtered", 1.0), timed("alone", 1.0)
    filtered.filtered["its source has 99 bytes and the device's profile allows 9"] = 3
    for progress in (filtered, alone):
        progress.end_round(1.0, 1.0)
    finish([filtered, alone], cut=True)
    assert [p.stage for p in (filtered, alone)] == [TaskState.SKIPPED, TaskState.SKIPPED]
    assert "none of its 3 candidates" in filtered.reason
    assert "source" in filtered.reason
    assert "no schedule but the default one" in alone.reason


def test_a_share_beyond_the_roofline_is_shown_as_it_is() -> None:
    progress = timed("fast", 1e-3, roofline=2e-3)
    assert progress.row().roofline_share == pytest.approx(2.0)
    assert progress.beyond


def test_caches_lower_the_roofline_of_traffic() -> None:
    assert task(nbytes=10**6).roofline(PEAKS, 40e9) == pytest.approx(25e-6 + 1e-6)
    assert task(nbytes=10**6).roofline(PEAKS, 1e9) == pytest.approx(100e-6 + 1e-6)


def test_a_condemned_best_is_forgotten() -> None:
    progress = timed("task", 1.0)
    progress.record_time(0.5, "trace")
    progress.forget_best()
    assert (progress.best, progress.best_trace) == (1.0, None)


@given(
    st.lists(st.tuples(st.floats(1e-6, 1.0), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_choosing_always_ends(tasks: list[tuple[float, int]], seed: int) -> None:
    random = Random(seed)
    progress = [timed(str(n), seconds, weight) for n, (seconds, weight) in enumerate(tasks)]
    for _ in range(2000):  # each of four tasks may go from 1 s to its roofline by 5 % a round
        chosen = next_task(progress)
        if chosen is None:
            return
        before = chosen.best
        assert before is not None
        chosen.record_time(before * random.uniform(0.9, 1.0), "t")
        chosen.end_round(before, random.uniform(0.1, 30.0))
    pytest.fail("the search never ends")


def test_a_round_that_left_nothing_beside_the_best_ends_a_task_sooner() -> None:
    fruitless, exhausted = timed("a", 1e-3), timed("b", 1e-3)
    for progress in (fruitless, exhausted):
        progress.end_round(1e-3, 1.0, last=progress is exhausted)
    assert exhausted.rate == pytest.approx(fruitless.rate / 2)
    won = timed("c", 1e-3)
    won.record_time(0.5e-3, "t")
    won.end_round(1e-3, 1.0, last=True)
    assert won.rate == pytest.approx(0.5), "what wins is not left"


def test_the_task_whose_turn_comes_next_is_foretold() -> None:
    one, other = timed("one", 1e-3), timed("other", 0.8e-3)
    assert next_task([one, other]) is one
    assert likely_next([one, other], one) is other, "should this round win nothing"
    assert likely_next([one], one) is one
    assert one.rate == 0.5, "foretelling changes nothing"
    one.rate = 0.003
    assert likely_next([one], one) is None


def test_what_others_found_is_tried_before_any_search() -> None:
    little, much, most = (timed(key, seconds) for key, seconds in (("a", 0.01), ("b", 0.02), ("c", 1.0)))
    for one in (little, much):
        one.hinted, one.rate = True, 0.0  # whatever a search is expected to win
    tasks = [little, much, most]
    assert next_task(tasks) is much
    assert likely_next(tasks, much) is little
    much.end_round(0.02, 1.0)
    little.skip("too small to matter")
    assert next_task(tasks) is most
