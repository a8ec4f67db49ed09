"""What peaks allow and how they rise, without a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.machine.profile import (
    DevicePeaks,
    higher_peaks,
    launch_seconds,
    least_seconds,
    peak_gbs,
    peak_gflops,
    raise_peaks,
    with_traffic,
)

KIB = 1 << 10
PEAKS = DevicePeaks(
    fp32_gflops=100.0,
    fp16_gflops=200.0,
    bandwidth_gbs=10.0,
    launch_us=1.0,
    caches_gbs=((64 * KIB, 60.0), (256 * KIB, 80.0), (4096 * KIB, 30.0)),
    busy=0.0,
)
RATE = st.floats(1e-3, 1e6)
SOME = st.builds(
    DevicePeaks,
    fp32_gflops=RATE,
    fp16_gflops=st.none() | RATE,
    bandwidth_gbs=RATE,
    launch_us=RATE,
    caches_gbs=st.dictionaries(st.integers(1, 1 << 25), RATE, max_size=4).map(
        lambda rates: tuple(sorted(rates.items()))
    ),
    empty_us=st.none() | RATE,
)


@pytest.mark.parametrize(
    ("nbytes", "gbs"),
    [
        (1, 80.0),  # what is measured so small is the launch: a larger set moved faster
        (64 * KIB, 80.0),
        (256 * KIB, 80.0),
        (1024 * KIB, 80.0),  # from the nearest size below
        (4096 * KIB, 30.0),
        (63 << 20, 30.0),
        (64 << 20, 10.0),
        (1 << 40, 10.0),
    ],
)
def test_small_working_sets_move_at_the_speed_of_caches(nbytes: int, gbs: float) -> None:
    assert peak_gbs(PEAKS, nbytes) == gbs
    assert peak_gbs(replace(PEAKS, caches_gbs=()), nbytes) == 10.0


def test_the_roofline_is_the_slower_of_work_and_traffic() -> None:
    assert least_seconds(PEAKS, 1e9, 8, half=False) == pytest.approx(10e-3)
    assert least_seconds(PEAKS, 1e9, 8, half=True) == pytest.approx(5e-3)
    assert least_seconds(PEAKS, 1, 256 * KIB, half=True) == pytest.approx(256 * KIB / 80e9)
    assert peak_gflops(replace(PEAKS, fp16_gflops=None), half=True) == 100.0


@given(SOME, st.floats(0, 1e12), st.integers(1, 1 << 30), st.floats(1e-6, 1.0), st.booleans())
def test_what_was_proven_is_within_the_peaks_afterwards(
    peaks: DevicePeaks, flops: float, nbytes: int, seconds: float, half: bool
) -> None:
    raised = raise_peaks(peaks, flops, nbytes, seconds, half=half)
    assert least_seconds(raised, flops, nbytes, half=half) <= seconds * (1 + 1e-9)
    assert higher_peaks(raised, peaks) == raised, "nothing is lower than before"
    assert (raised == peaks) == (least_seconds(peaks, flops, nbytes, half=half) <= seconds) or (
        least_seconds(peaks, flops, nbytes, half=half) == pytest.approx(seconds)
    )


@given(SOME, st.integers(1, 1 << 30), RATE)
def test_what_was_seen_to_move_is_no_record_of_a_kernel(peaks: DevicePeaks, nbytes: int, rate: float) -> None:
    seen = with_traffic(peaks, nbytes, rate)
    assert peak_gbs(seen, nbytes) == max(rate, peak_gbs(peaks, nbytes))
    assert seen.raised == ()
    assert higher_peaks(seen, peaks) == seen


def test_each_figure_is_raised_by_itself() -> None:
    half = raise_peaks(PEAKS, 5e9, 8, 0.01, half=True)
    assert half == replace(PEAKS, fp16_gflops=pytest.approx(500.0), raised=("fp16_gflops",))
    single = raise_peaks(half, 5e9, 8, 0.01, half=False)
    assert single.raised == ("fp16_gflops", "fp32_gflops")
    moved = raise_peaks(PEAKS, 0, 8 << 20, 1e-4, half=False)
    assert moved.caches_gbs[-1] == (4096 * KIB, pytest.approx(83.9, rel=1e-3))
    assert (moved.bandwidth_gbs, moved.raised) == (10.0, ("bandwidth_gbs",))
    main = raise_peaks(PEAKS, 0, 1 << 30, 0.05, half=False)
    assert (main.bandwidth_gbs, main.caches_gbs) == (pytest.approx(21.47, rel=1e-3), PEAKS.caches_gbs)


def test_a_figure_stays_raised_until_a_benchmark_reaches_it() -> None:
    raised = raise_peaks(PEAKS, 1.5e9, 8, 0.01, half=False)
    assert raised.raised == ("fp32_gflops",)
    assert higher_peaks(raised, raised) == raised
    assert higher_peaks(PEAKS, raised).raised == ("fp32_gflops",)
    assert higher_peaks(raised, replace(PEAKS, fp32_gflops=149.0)).raised == ("fp32_gflops",)
    assert higher_peaks(raised, replace(PEAKS, fp32_gflops=150.0)).raised == ()


@given(SOME, SOME)
def test_the_best_that_either_saw(one: DevicePeaks, other: DevicePeaks) -> None:
    both = higher_peaks(one, other)
    assert both == higher_peaks(other, one)
    assert higher_peaks(both, one) == both
    assert both.fp32_gflops == max(one.fp32_gflops, other.fp32_gflops)
    assert both.launch_us == min(one.launch_us, other.launch_us)
    assert dict(both.caches_gbs).keys() == dict(one.caches_gbs).keys() | dict(other.caches_gbs).keys()


def test_the_shortest_empty_kernel_counts() -> None:
    slow, fast, unknown = (replace(PEAKS, empty_us=us) for us in (2.0, 1.0, None))
    assert higher_peaks(slow, fast).empty_us == 1.0
    assert higher_peaks(slow, unknown).empty_us == 2.0
    assert launch_seconds(slow) == pytest.approx(2e-6)
    assert launch_seconds(unknown) == pytest.approx(1e-6 * PEAKS.launch_us)


def test_the_quieter_measurement_says_how_busy_it_was() -> None:
    busy, quiet, unknown = (replace(PEAKS, busy=share) for share in (0.5, 0.01, None))
    assert higher_peaks(busy, quiet).busy == 0.01
    assert higher_peaks(busy, unknown).busy == 0.5
