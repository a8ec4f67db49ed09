"""The checks as functions of what was read: where each begins to refuse."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.machine.families import mali_model
from honed.machine.profile import DeviceLimits, DevicePeaks
from honed.protocol.strict import from_plain, to_plain
from honed.runtime.execution import verification
from honed.tuner.lower.program import MemoryValue
from honed.tuner.measure import checks, timing
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.measure.checks import (
    AFTER_RUN,
    AFTER_WAIT,
    ExpectedOutput,
    Finished,
    Launched,
    Refusal,
    Waited,
    first_refusal,
)
from honed.tuner.records.rows import Outcome
from tests.tuner.liars import honest
from tests.tuner.liars.checking import NAMES

PEAKS = DevicePeaks(fp32_gflops=100.0, fp16_gflops=200.0, bandwidth_gbs=10.0, launch_us=1.0)
LIMITS = DeviceLimits(
    compute_units=2,
    max_work_group_size=256,
    max_work_item_sizes=(256, 256, 64),
    local_mem_bytes=1 << 15,
    global_mem_bytes=1 << 30,
    max_alloc_bytes=1 << 28,
    base_align_bytes=128,
    fp16=True,
    fp64=True,
    int8_dots=False,
    host_unified=True,
)


def workload(dtype: str = "float32", *, flops: int = 0, moved: int = 0) -> Workload:
    return Workload(
        task="t",
        parameters=(MemoryValue(dtype=dtype, shape=(8,)), MemoryValue(dtype=dtype, shape=(8,))),
        outputs=(1,),
        sets=1,
        folder=Path("nowhere"),
        flops=flops,
        bytes=moved,
        tolerance=(1e-3,),
    )


def run(*seconds: float, wall: float, status: int = 0) -> Finished:
    return Finished(tuple(Launched(status, 1000, 1000 + round(s * 1e9)) for s in seconds), wall)


def outcome(refusal: Refusal | None) -> Outcome | None:
    return None if refusal is None else refusal.outcome


def test_completed_needs_the_status_and_start_before_end() -> None:
    assert checks.check_completed(run(1e-3, 2e-3, wall=1)) is None
    assert outcome(checks.check_completed(run(1e-3, wall=1, status=-5))) is Outcome.RUN
    assert outcome(checks.check_completed(run(1e-3, wall=1, status=1))) is Outcome.RUN
    assert outcome(checks.check_completed(run(1e-3, 0.0, wall=1))) is Outcome.RUN
    assert outcome(checks.check_completed(Finished((Launched(0, 10, 9),), 1.0))) is Outcome.RUN


def test_in_time_is_by_run() -> None:
    assert checks.in_time(run(0.5, 0.5, wall=1), 1.0) is None
    assert outcome(checks.in_time(run(0.5, 0.51, wall=1), 1.0)) is Outcome.DEADLINE


def test_the_device_cannot_take_longer_than_the_host_waited() -> None:
    assert checks.wall_above(run(1.0, wall=0.99)) is None
    assert outcome(checks.wall_above(run(1.0, wall=0.9))) is Outcome.RUN
    assert checks.wall_above(run(50e-6, wall=0.0)) is None


def test_the_host_cannot_wait_far_longer_than_the_device_took_every_time() -> None:
    slow, fine = run(1e-3, wall=0.1), run(1e-3, wall=2e-3)
    assert outcome(checks.wall_below([slow, slow])) is Outcome.RUN
    assert checks.wall_below([slow, fine]) is None, "once the host may have been busy"
    assert checks.wall_below([run(0.1, wall=0.4)]) is None
    # A clock in units of 24 MHz that says nanoseconds.
    assert outcome(checks.wall_below([run(0.1 / 41.67, wall=0.1)])) is Outcome.RUN


@pytest.mark.parametrize(
    ("dtype", "gflops"), [("float32", 100.0), ("float16", 200.0), ("int8", 400.0), ("float64", 100.0)]
)
def test_beyond_the_peak_and_beyond_belief_by_arithmetic(dtype: str, gflops: float) -> None:
    task = workload(dtype, flops=10**9)
    most = checks.ceiling(task, PEAKS)
    limit = checks.physical(task, most, None, 4)
    least = 1.0 / gflops
    assert not checks.beyond(task, most, least * 1.001)
    assert f"peak allows {gflops:.4g}" in checks.beyond(task, most, least / 1.001)
    assert checks.possible(task, limit, least / 2.99) is None
    assert outcome(checks.possible(task, limit, least / 3.01)) is Outcome.IMPOSSIBLE


def test_possible_by_traffic_goes_by_the_rate_seen_at_that_size() -> None:
    task = workload(moved=10**9)
    assert "allows 10 GB/s" in checks.beyond(task, checks.ceiling(task, PEAKS), 0.09)
    assert not checks.beyond(task, checks.ceiling(task, replace(PEAKS, bandwidth_gbs=20.0)), 0.09)
    small, peaks = workload(moved=1 << 20), replace(PEAKS, caches_gbs=((1 << 18, 50.0),))
    assert not checks.beyond(small, checks.ceiling(small, peaks), (1 << 20) / 49e9)
    assert checks.beyond(small, checks.ceiling(small, peaks), (1 << 20) / 51e9)
    limit = checks.physical(task, checks.ceiling(task, PEAKS), None, 4)
    assert checks.possible(task, limit, 0.034) is None
    assert outcome(checks.possible(task, limit, 0.033)) is Outcome.IMPOSSIBLE


def test_a_known_chip_bounds_what_is_believable() -> None:
    """Four cores of a G610 do 512 GFLOP/s at 1 GHz: three times what clpeak reaches there is too much."""
    peaks = replace(PEAKS, fp32_gflops=470.0, fp16_gflops=910.0)
    chip = mali_model("Mali-LODX r0p0")
    for dtype, gflops in (("float32", 768.0), ("float16", 1536.0), ("int32", 3 * 4 * 470.0)):
        task = workload(dtype, flops=10**9)
        limit = checks.physical(task, checks.ceiling(task, peaks), chip, 4)
        assert limit.operations == pytest.approx(gflops * 1e9)
    task = workload(flops=10**9)
    high = checks.ceiling(task, replace(PEAKS, fp32_gflops=900.0))
    assert checks.physical(task, high, chip, 4).operations == high.operations, "never below what was measured"


def test_case_2_is_impossible() -> None:
    """7,122 GFLOP/s on a GPU whose peak is about 700 (cases.md, 2)."""
    flops = 2 * 348 * 2084 * 12 * 12
    task = workload(flops=flops)
    peaks = DevicePeaks(fp32_gflops=700.0, fp16_gflops=None, bandwidth_gbs=30.0, launch_us=5.0)
    limit = checks.physical(task, checks.ceiling(task, peaks), None, 4)
    assert outcome(checks.possible(task, limit, 29e-6)) is Outcome.IMPOSSIBLE


ALONE = [run(1.9e-3, wall=1.0), run(4e-3, wall=1.0)]  # runs verified one by one, as cold as may be


def series(device: float, wall: float) -> Finished:
    """Twenty runs of a candidate that claims 1 ms."""
    return run(*[device / 20] * 20, wall=wall)


def test_two_clocks_that_agree_are_evidence() -> None:
    assert checks.evident("it", 1e-3, ALONE, [series(0.02, 0.0249)], 20, 0.0) is None
    busy = series(0.02, 0.1)
    assert checks.evident("it", 1e-3, ALONE, [busy, series(0.02, 0.021), busy], 20, 0.0) is None
    assert checks.evident("it", 1e-3, ALONE, [series(0.02, 0.0289)], 20, 200e-6) is None, "it is the launches"


@pytest.mark.parametrize("counted", [0.02, 0.04])
def test_a_time_that_only_the_device_counts_is_no_evidence(counted: float) -> None:
    """Whether its clock is wrong always, or was once."""
    refused = checks.evident("it is 2 GFLOP/s", 1e-3, ALONE, [series(counted, 0.04)] * 5, 20, 0.0)
    assert outcome(refused) is Outcome.IMPOSSIBLE
    assert refused is not None
    assert refused.reason == "it is 2 GFLOP/s, and the host counts 40 ms for 20 runs, which would be 20 ms"


def test_runs_that_were_left_out_are_no_evidence() -> None:
    """Both clocks see how fast nothing is done; a run that was looked at took its time."""
    refused = checks.evident("it", 1e-3, [run(2.1e-3, wall=1.0)] * 3, [series(0.02, 0.02)], 20, 0.0)
    assert outcome(refused) is Outcome.IMPOSSIBLE
    assert refused is not None
    assert "no run that was verified took less than 2100 us" in refused.reason


def test_guard_bands() -> None:
    band = np.full(64, 0xA5, np.uint8)
    assert checks.guard_intact(band, band, 0xA5, "x") is None
    for place in (0, 63):
        damaged = band.copy()
        damaged[place] = 0
        before = checks.guard_intact(damaged, band, 0xA5, "x")
        after = checks.guard_intact(band, damaged, 0xA5, "x")
        assert before is not None
        assert after is not None
        assert f"{64 - place} bytes before its start" in before.reason
        assert f"{place} bytes beyond its end" in after.reason


@given(st.sampled_from(["float16", "float32", "float64", "int8", "uint8", "int64", "bool"]), st.data())
def test_written_finds_just_what_was_left(dtype: str, data: st.DataObject) -> None:
    """Whatever bits a kernel writes, an element counts as left only if nothing was written there."""
    size = np.dtype(dtype).itemsize
    count = data.draw(st.integers(1, 20))
    values = np.frombuffer(data.draw(st.binary(min_size=count * size, max_size=count * size)), f"u{size}")
    left = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    runs = []
    for poison in (0xFF, 0xA5):
        poisoned = np.full(count * size, poison, np.uint8).view(f"u{size}")
        runs.append(np.where(left, poisoned, values).view(dtype))
    refusal = checks.check_written(runs[0], 0xFF, runs[1], 0xA5, "x")
    assert (refusal is not None) == left.any()
    if refusal is not None:
        assert refusal.outcome is Outcome.UNWRITTEN
        assert f"{left.sum()} of {count}" in refusal.reason


def test_unchanged_is_bit_for_bit() -> None:
    zeros = np.array([0.0, np.nan], np.float32)
    assert checks.check_unchanged(zeros, zeros.copy(), "x") is None
    assert (
        outcome(checks.check_unchanged(zeros, np.array([-0.0, np.nan], np.float32), "x"))
        is Outcome.OUT_OF_BOUNDS
    )


def test_repeated_is_bit_for_bit() -> None:
    given = np.array([0.0, np.nan, 1.0], np.float32)
    assert checks.check_repeated(given, given.copy(), "x") is None
    found = checks.check_repeated(given, np.array([-0.0, np.nan, 1 + 2.0**-23], np.float32), "x")
    assert outcome(found) is Outcome.WRONG
    assert found is not None
    assert "2 of 3 elements of x" in found.reason


def test_a_time_that_one_run_on_new_inputs_comes_near_is_believed() -> None:
    slow, near = run(0.1, wall=1), run(0.0081, wall=1)
    assert checks.check_computed_anew([slow, near], 1e-3) is None
    assert outcome(checks.check_computed_anew([slow, slow], 1e-3)) is Outcome.IMPOSSIBLE
    assert checks.check_computed_anew([run(200e-6, wall=1)], 1e-6) is None, "clocks and caches may be cold"
    assert checks.check_computed_anew([], 1e-6) is None


def test_private_memory_is_counted_for_the_whole_device() -> None:
    assert checks.private_memory("k", 1024, 256, 4, 1 << 20) is None
    found = checks.private_memory("k", 1025, 256, 4, 1 << 20)
    assert outcome(found) is Outcome.MEMORY


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=12),
    st.lists(st.floats(width=32), min_size=12, max_size=12),
    st.sampled_from([0.0, 1e-6, 1e-3, 0.5]),
    st.booleans(),
)
def test_right_agrees_with_the_exact_comparison(
    reference: list[float], other: list[float], tolerance: float, near: bool
) -> None:
    expected = np.array(reference, np.float32)
    found = np.array(other[: len(reference)], np.float32)
    if near:
        with np.errstate(all="ignore"):
            found = (expected * np.float32(1 + tolerance)).astype(np.float32)
    refusal = checks.right(ExpectedOutput.of(expected, tolerance), found, "x")
    assert (refusal is None) == verification.compare(expected, found, tolerance).right


def test_integers_must_be_equal() -> None:
    expected = ExpectedOutput.of(np.array([2**40, 7]), 0.0)
    assert checks.right(expected, np.array([2**40, 7]), "x") is None
    assert outcome(checks.right(expected, np.array([2**40 + 1, 7]), "x")) is Outcome.WRONG


def test_sound_refuses_launches_that_cannot_be() -> None:
    task = workload()
    whole = honest.launch(task.parameters, task.outputs, groups=1, group=8)

    def with_launch(**changes: object) -> Candidate:
        from dataclasses import replace

        return Candidate(id="c", source="", inner=(), launches=(replace(whole, **changes),))  # type: ignore[arg-type]

    assert checks.sound(task, with_launch(), LIMITS) is None
    larger = tuple(honest.launch([MemoryValue(dtype="float32", shape=(9,))], [], groups=1).arg_types) * 2
    for wrong in (
        {"args": (0, 2)},
        {"args": (0, -1)},
        {"arg_types": larger},
        {"block": (257, 1, 1)},
        {"block": (1, 1, 65)},
        {"block": (32, 16, 1)},
        {"grid": (0, 1, 1)},
    ):
        assert outcome(checks.sound(task, with_launch(**wrong), LIMITS)) is Outcome.BUILD, wrong


def test_the_first_row_that_refuses_decides_unless_it_is_left_out() -> None:
    late = Waited(run(2.0, wall=1.0, status=-5), limit=1.0)
    refusing = [row.name for row in AFTER_WAIT if row.refuses(late)]
    assert [name for name in refusing if name in ("completed", "deadline", "wall")] == refusing
    assert outcome(first_refusal(AFTER_WAIT, late)) is Outcome.RUN
    assert outcome(first_refusal(AFTER_WAIT, late, {"completed"})) is Outcome.DEADLINE
    assert first_refusal(AFTER_WAIT, late, NAMES) is None
    assert first_refusal(AFTER_WAIT, Waited(run(2.0, wall=2.0))) is None, "it may take what it takes"


def test_a_run_that_nobody_judged_is_judged_with_the_next() -> None:
    """What one poison hides the other shows, and the answers of both runs count."""
    reference, wrong = np.array([1.0, 2.0], np.float32), np.array([1.0, 3.0], np.float32)
    poisoned = np.frombuffer(b"\xff" * 8, np.float32)
    expected = ExpectedOutput.of(reference, 1e-3)

    def left(found: np.ndarray, earlier: np.ndarray | None, unjudged: int | None = None) -> Outcome | None:
        output = checks.RunOutput("output 1", expected, found, earlier)
        seen = checks.MemoryAfterRun(0xA5, [], outputs=[output], unjudged=unjudged)
        return outcome(first_refusal(AFTER_RUN, seen, {"repeated"}))

    assert left(reference, None) is None
    assert left(wrong, None) is Outcome.WRONG
    assert left(reference, wrong) is None, "it was judged before"
    assert left(reference, wrong, 0xFF) is Outcome.WRONG
    assert left(poisoned.view(np.uint8).copy().view(np.float32), poisoned, 0xA5) is Outcome.WRONG
    assert left(np.frombuffer(b"\xa5" * 8, np.float32), poisoned, 0xFF) is Outcome.UNWRITTEN


def test_the_document_tells_of_all_checks_in_their_order() -> None:
    text = (Path(__file__).parents[3] / "docs" / "dev" / "verdicts.md").read_text()
    told = re.findall(r"^\| \d+ \| (\w+) \|", text, re.MULTILINE)
    rows = [name for name in NAMES if name not in ("stale", "fence", "clean")]
    assert [name for name in told if name in rows] == rows
    assert set(told) == {*NAMES, "built"}, "which is no row: the driver's compiler decides"


def test_the_interval_of_the_median() -> None:
    def around(samples: Sequence[float]) -> tuple[float, float, float]:
        found = timing.interval(samples)
        assert found.repeats == len(samples)
        return found.low_s, found.median_s, found.high_s

    assert around([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert around(range(1, 7)) == (1, 3.5, 6)
    # Ranks 2 and 8 of 9, 10 and 21 of 30: textbook values for 95 %.
    assert around(range(1, 10)) == (2, 5, 8)
    assert around(range(1, 31)) == (10, 15.5, 21)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    for n in (6, 9, 20, 40):
        draws = rng.lognormal(size=(4000, n))
        held = sum(found.low_s <= 1.0 <= found.high_s for found in map(timing.interval, draws))
        assert held / 4000 >= 0.94, n


def test_workloads_and_candidates_travel_whole(tmp_path: Path) -> None:
    task = honest.scale(tmp_path / "s", 64)
    made = honest.candidate(task, honest.SCALE, groups=1, inner=(MemoryValue(dtype="int8", shape=()),))
    assert from_plain(Workload, to_plain(task), where="") == task
    assert from_plain(Candidate, to_plain(made), where="") == made
