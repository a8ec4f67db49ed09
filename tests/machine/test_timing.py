from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from honed.machine.devices import Device
from honed.machine.profile import DevicePeaks, DeviceProfile
from honed.runtime import load
from honed.runtime.execution import timing
from tests.daemon.running import wait_for
from tests.runtime.builder import Builder, add_constant, chain

PEAKS = DevicePeaks(fp32_gflops=100.0, fp16_gflops=200.0, bandwidth_gbs=10.0, launch_us=1.0)
BUSY = """__kernel void busy(__global const float* a, __global float* out) {
  int i = get_global_id(0); float v = a[i];
  for (int k = 0; k < 20000; ++k) v = fma(v, 0.5f, 0.5f);
  out[i] = v; }"""


def test_rows_name_every_kernel(device: Device, tmp_path: Path) -> None:
    known = replace(device, profile=replace(device.profile, peaks=PEAKS))
    with load(add_constant(64).write(tmp_path / "m.honed", device.profile), known) as executor:
        found = executor.profile({"x": np.ones(64, np.float32)})
    rows = {row.name: row for row in found.kernels}
    assert rows.keys() == {"add", "increment"}
    assert found.launches == 2
    assert found.sum_us == pytest.approx(sum(row.us for row in found.kernels))
    assert sum(row.share for row in found.kernels) == pytest.approx(1)
    assert 0 < found.sum_us < found.whole_us
    assert [row.us for row in found.kernels] == sorted((row.us for row in found.kernels), reverse=True)
    row = rows["add"]
    assert (row.kind, row.count, row.task, row.schedule) == ("kernel", 1, "task", "by hand")
    assert row.gflops == pytest.approx(64e-3 / row.us)
    assert row.gbs == pytest.approx(12 * 64e-3 / row.us)
    assert row.peak_share == pytest.approx(12 * 64 / 10e9 * 1e6 / row.us)


def test_launches_of_a_kernel_are_one_row(device: Device, tmp_path: Path) -> None:
    with load(chain(100).write(tmp_path / "m.honed", device.profile), device) as executor:
        found = executor.profile({"x": np.ones(8, np.float32)})
    (row,) = found.kernels
    assert (row.count, found.launches, row.share) == (100, 100, 1.0)
    assert row.peak_share is None  # the device's peaks were not measured


def test_kernels_make_up_the_whole(device: Device, tmp_path: Path) -> None:
    """Where kernels do work worth mentioning, their sum is within 10 % of the inference."""
    n = 16 * device.profile.limits.compute_units
    b = Builder()
    current = b.input("x", "float32", (n,))
    source = BUSY.replace("20000", "300000")  # many times the cost of a launch, on a GPU too
    kernel = b.kernel(source, "busy", "rw", 4 * n, groups=n // 16, block=16)
    for _ in range(10):
        following = b.scratch("float32", (n,))
        b.launch(kernel, current, following)
        current = following
    b.copy(current, b.output("y", "float32", (n,)))
    with load(b.write(tmp_path / "m.honed", device.profile), device) as executor:

        def make_up_the_whole() -> bool:
            found = executor.profile({"x": np.ones(n, np.float32)})
            assert found.sum_us <= found.whole_us
            return found.sum_us / found.whole_us > 0.9

        # A busy machine takes processors away between two kernels, too; kernels left out never make it up.
        wait_for(make_up_the_whole, "an inference of kernels alone")


def test_roofline() -> None:
    b = Builder()
    b.kernel("__kernel void k() {}", "k", "", 0, groups=1, block=1, flops=10**9, moved=10**6)
    b.kernel("__kernel void k() {}", "k", "r", 0, groups=1, block=1, flops=10**9, moved=10**6, kind="float16")
    b.kernel("__kernel void k() {}", "k", "", 0, groups=1, block=1, flops=10**6, moved=10**9)
    single, half, moving = (timing.roofline_seconds(kernel, PEAKS) for kernel in b.kernels)
    assert (single, half, moving) == pytest.approx((0.01, 0.005, 0.1))
    no_half = replace(PEAKS, fp16_gflops=None)
    assert timing.roofline_seconds(b.kernels[1], no_half) == pytest.approx(0.01)
    small = Builder()
    small.kernel("__kernel void k() {}", "k", "", 0, groups=1, block=1, flops=1, moved=10**6)
    cached = replace(PEAKS, caches_gbs=((1 << 18, 50.0),))
    assert timing.roofline_seconds(small.kernels[0], cached) == pytest.approx(10**6 / 50e9)


def test_peaks_are_plausible(profile: DeviceProfile) -> None:
    """Within what any device that runs OpenCL can have, so that a wrong unit or count shows."""
    found = profile.peaks
    assert found is not None
    assert 1 < found.fp32_gflops < 1e6
    assert 0.5 < found.bandwidth_gbs < 1e5
    assert 0.05 < found.launch_us < 1e3
    assert found.empty_us is not None
    assert 0 <= found.empty_us < 1e3
    assert [size for size, _ in found.caches_gbs] == [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
    assert all(0.05 < gbs < 1e6 for _, gbs in found.caches_gbs)
    assert found.busy is not None
    # What other tests tune in the same folder may have raised them.
    assert {*found.raised} <= {"fp32_gflops", "fp16_gflops", "bandwidth_gbs"}


def test_peaks_bound_what_a_kernel_shows(device: Device, profile: DeviceProfile, tmp_path: Path) -> None:
    n = 256 * device.profile.limits.compute_units
    b = Builder()
    flops, moved = 2 * 20_000 * n, 8 * n
    kernel = b.kernel(BUSY, "busy", "rw", 4 * n, groups=n // 16, block=16, flops=flops, moved=moved)
    b.launch(kernel, b.input("x", "float32", (n,)), b.output("y", "float32", (n,)))
    known = replace(device, profile=profile)
    with load(b.write(tmp_path / "m.honed", device.profile), known) as executor:
        (row,) = executor.profile({"x": np.ones(n, np.float32)}).kernels
    assert row.peak_share is not None
    assert 0 < row.peak_share < 1.1


def test_spans_are_the_inference_in_time(device: Device, tmp_path: Path) -> None:
    with load(chain(5).write(tmp_path / "m.honed", device.profile), device) as executor:
        found = executor.profile({"x": np.ones(8, np.float32)})
    spans = found.spans
    assert len(spans) == 5
    assert {span.name for span in spans} == {row.name for row in found.kernels}
    for span in spans:
        assert 0 <= span.host_us <= span.host_end_us <= found.whole_us
        assert span.device_us is not None
        assert span.device_end_us is not None
        assert 0 <= span.device_us <= span.device_end_us
    assert [span.host_us for span in spans] == sorted(span.host_us for span in spans)
    computed = sum((span.device_end_us or 0) - (span.device_us or 0) for span in spans)
    assert computed == pytest.approx(found.sum_us, abs=0.1)
