"""When peaks are measured, and what is kept of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.machine import microbench, peaks
from honed.machine.devices import Device
from honed.machine.families import FAMILIES
from honed.machine.microbench import ArithmeticForm, Bench
from honed.machine.profile import DevicePeaks, higher_peaks

FOUND = DevicePeaks(
    fp32_gflops=100.0,
    fp16_gflops=None,
    bandwidth_gbs=10.0,
    launch_us=1.0,
    caches_gbs=((1 << 16, 50.0),),
    empty_us=0.5,
    busy=0.01,
)


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[DevicePeaks], list[DevicePeaks]]:
    """Plants what measuring finds; gives a list that grows by each measurement."""

    def plant(found: DevicePeaks) -> list[DevicePeaks]:
        made: list[DevicePeaks] = []

        def measure(_device: Device) -> DevicePeaks:
            made.append(found)
            return found

        monkeypatch.setattr(peaks, "measure", measure)
        return made

    return plant


def kept_file(folder: Path) -> Path:
    (path,) = (p for p in folder.rglob("*") if p.is_file())
    return path


def age(folder: Path, seconds: float) -> None:
    """Make what is kept so much older."""
    path = kept_file(folder)
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_once(device: Device, tmp_path: Path, measuring: Callable[..., list[DevicePeaks]]) -> None:
    made = measuring(FOUND)
    assert not peaks.has_stored(device, tmp_path)
    for _ in range(2):
        assert peaks.load_or_measure(device, tmp_path) == replace(device.profile, peaks=FOUND)
        assert peaks.has_stored(device, tmp_path)
    age(tmp_path, 1e9)
    assert peaks.load_or_measure(device, tmp_path).peaks == FOUND
    assert len(made) == 1


def test_again_where_the_file_is_damaged(
    device: Device, tmp_path: Path, measuring: Callable[..., list[DevicePeaks]]
) -> None:
    made = measuring(FOUND)
    profile = peaks.load_or_measure(device, tmp_path)
    kept = kept_file(tmp_path)
    text = kept.read_text()
    name = profile.identity.name
    for damage in ("", text.replace("fp32_gflops", "fp8_gflops"), text.replace(name, "abacus")):
        kept.write_text(damage)
        before = len(made)
        assert not peaks.has_stored(device, tmp_path)
        assert peaks.load_or_measure(device, tmp_path) == profile
        assert len(made) == before + 1
        assert kept.read_text() == text


def test_again_later_where_the_machine_was_busy(
    device: Device, tmp_path: Path, measuring: Callable[..., list[DevicePeaks]]
) -> None:
    busy = replace(FOUND, fp32_gflops=77.0, launch_us=0.5, busy=0.5)
    measuring(busy)
    assert peaks.load_or_measure(device, tmp_path).peaks == busy
    made = measuring(FOUND)
    assert peaks.load_or_measure(device, tmp_path).peaks == busy, "not at once"
    age(tmp_path, peaks.AGAIN_SECONDS + 1)
    assert not peaks.has_stored(device, tmp_path)
    best = replace(FOUND, launch_us=0.5)
    assert peaks.load_or_measure(device, tmp_path).peaks == best
    age(tmp_path, peaks.AGAIN_SECONDS + 1)
    assert peaks.load_or_measure(device, tmp_path).peaks == best
    assert len(made) == 1


def test_why_says_it() -> None:
    assert peaks.why_outdated(FOUND, 1e9) == ""
    assert "others took 50 % of the CPUs" in peaks.why_outdated(replace(FOUND, busy=0.5), 1e9)
    assert peaks.why_outdated(replace(FOUND, busy=None), 1e9) == ""


def test_raised_peaks_are_kept_and_none_is_lowered(
    device: Device, tmp_path: Path, measuring: Callable[..., list[DevicePeaks]]
) -> None:
    measuring(FOUND)
    peaks.load_or_measure(device, tmp_path)
    raised = replace(FOUND, fp32_gflops=130.0, bandwidth_gbs=5.0, raised=("fp32_gflops",))
    peaks.keep_higher(replace(device.profile, peaks=raised), tmp_path)
    assert peaks.load_or_measure(device, tmp_path).peaks == higher_peaks(FOUND, raised)
    before = kept_file(tmp_path).stat().st_mtime_ns
    peaks.keep_higher(replace(device.profile, peaks=FOUND), tmp_path)
    peaks.keep_higher(device.profile, tmp_path)
    assert kept_file(tmp_path).stat().st_mtime_ns == before, "nothing new is not written"


@pytest.mark.parametrize(("family", "widest"), [("cpu", 12), ("mali", 8), ("gpu", 8)])
def test_forms_hold_what_fits_the_registers(family: str, widest: int) -> None:
    forms = microbench.forms(FAMILIES[family].accumulators)
    assert len(set(forms)) == len(forms)
    assert {form.width for form in forms} == {1, 2, 4, 8, 16}
    assert ArithmeticForm(8, 12) in forms, "AVX2 needs 8 lanes and more than 8 chains"
    assert max(form.chains for form in forms if form.width == 16) == widest


def test_the_best_form_runs_again_with_its_neighbours() -> None:
    rates = {ArithmeticForm(1, 4): 1.0, ArithmeticForm(8, 12): 9.0, ArithmeticForm(4, 8): 5.0}
    assert microbench.finalists(rates, 1024) == [
        ArithmeticForm(8, 12),
        ArithmeticForm(8, 12, "mad"),
        ArithmeticForm(8, 12, group=256),
        ArithmeticForm(4, 8),
    ]
    assert ArithmeticForm(8, 12, group=256) not in microbench.finalists(rates, 128)


def test_a_driver_without_fma_is_measured_with_mad(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    built, ran = Bench.build, list[ArithmeticForm]()

    def without_fma(bench: Bench, source: str) -> Any:
        return built(bench, source.replace("fma(", "no_such_function("))

    def quick(bench: Bench, kernel: Any, form: ArithmeticForm, *_: Any) -> float:
        ran.append(form)
        return 1e9

    monkeypatch.setattr(Bench, "build", without_fma)
    monkeypatch.setattr(microbench, "_quick", quick)
    monkeypatch.setattr(microbench, "_thorough", quick)
    assert microbench.gflops(Bench(device), "float") == 1.0
    assert {form.function for form in ran} == {"mad"}


def test_a_form_does_the_operations_it_counts() -> None:
    source = microbench.arithmetic_source(ArithmeticForm(4, 8), "half")
    assert source.count("fma(") * 2 * 4 == ArithmeticForm(4, 8).operations(1) == 2 * 4 * 8 * 4
    assert microbench.memory_source(16).count("in[get_global_id(0) + ") == 16
