"""The measurer outlives its children, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.runtime.errors import DeviceError, InvalidArgument
from honed.tuner.lower.program import MemoryValue
from honed.tuner.measure.candidate import Candidate, MeasureLimits, Workload
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import Outcome
from tests.daemon.running import wait_for
from tests.processes import has_ended
from tests.tuner.liars import compiler_abort, honest, kinds, leaky

N = honest.N
LIMITS = MeasureLimits(run_seconds=10.0)  # a busy machine may take its time to run anything


@pytest.fixture(scope="module")
def measurer(device: Device, profile: DeviceProfile, workload: Workload) -> Iterator[Measurer]:
    with Measurer(device.spec, profile, LIMITS) as one:
        yield one


def scale(workload: Workload, more: str = "") -> Candidate:
    return honest.candidate(workload, honest.SCALE + more, groups=N // 64)


def test_a_right_candidate_is_timed(measurer: Measurer, workload: Workload, tmp_path: Path) -> None:
    task = honest.dense(tmp_path / "dense")
    measurer.load(task)
    found = measurer.measure(honest.candidate(task, honest.dense_source(128, 64), groups=96 * 128 // 64))
    assert found.outcome is Outcome.RIGHT, found
    assert found.reason == ""
    timing = found.timing
    assert timing is not None
    assert 0 < timing.low_s <= timing.median_s <= timing.high_s < 60
    assert timing.repeats >= 6
    assert found.yardstick_s is not None
    measurer.load(workload)


def test_more_work_takes_longer(measurer: Measurer, workload: Workload) -> None:
    """Thousands of times the work, so that no other program that is busy makes up for it."""
    measurer.load(workload)
    times = []
    for source in (honest.SCALE, kinds.LONG):
        found = measurer.measure(honest.candidate(workload, source, groups=N // 64))
        assert found.timing is not None, found
        times.append(found.timing.median_s)
    assert times[1] > 4 * times[0]


def test_several_launches_with_memory_between_them(measurer: Measurer, workload: Workload) -> None:
    measurer.load(workload)
    inner = MemoryValue(dtype="float32", shape=(N,))
    source = """
    __kernel void twice(__global const float* in, __global float* inner) {
      inner[get_global_id(0)] = 2.0f * in[get_global_id(0)];
    }
    __kernel void more(__global const float* inner, __global float* out) {
      out[get_global_id(0)] = inner[get_global_id(0)] + 1.0f;
    }
    """
    values = (*workload.parameters, inner)
    launches = (
        honest.launch(values, (2,), groups=N // 64, entry="twice", args=(0, 2)),
        honest.launch(values, (1,), groups=N // 64, entry="more", args=(2, 1)),
    )
    made = Candidate(id="two", source=source, inner=(inner,), launches=launches)
    assert measurer.measure(made).outcome is Outcome.RIGHT
    back = replace(made, launches=launches[::-1])
    assert measurer.measure(back).outcome is Outcome.WRONG, "inner memory is poisoned before a run"


def test_right_candidates_share_a_child(measurer: Measurer, workload: Workload) -> None:
    measurer.load(workload)
    assert measurer.measure(scale(workload)).outcome is Outcome.RIGHT
    before = measurer.children
    for liar in (kinds.WRITES_HALF, kinds.NOT_C, kinds.DIVERGENT_BARRIER):
        assert measurer.measure(honest.candidate(workload, liar, groups=N // 64)).outcome is not Outcome.RIGHT
    assert measurer.measure(scale(workload)).outcome is Outcome.RIGHT
    assert measurer.children == before


def test_a_child_that_dies_is_replaced_and_has_the_workload(measurer: Measurer, workload: Workload) -> None:
    measurer.load(workload)
    pid = measurer.pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: has_ended(pid), "the child to end")
    found = measurer.measure(scale(workload))
    assert found.outcome is Outcome.CRASH
    assert "SIGTERM" in found.reason
    assert measurer.measure(scale(workload)).outcome is Outcome.RIGHT
    assert measurer.pid != pid


def test_a_child_that_hangs_is_killed(measurer: Measurer, workload: Workload) -> None:
    measurer.load(workload)
    pid = measurer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    limits = measurer._limits
    measurer._limits = replace(limits, start_seconds=0.5)
    try:
        assert measurer.measure(scale(workload)).outcome is Outcome.DEADLINE
    finally:
        measurer._limits = limits
    assert has_ended(pid)
    assert measurer.measure(scale(workload)).outcome is Outcome.RIGHT


@pytest.mark.slow
def test_a_child_that_has_grown_is_replaced(
    device: Device, profile: DeviceProfile, workload: Workload
) -> None:
    """What the driver leaks must not be counted against a later candidate."""
    limits = replace(LIMITS, memory_bytes=256 << 20)
    with Measurer(device.spec, profile, limits, command=leaky.COMMAND) as measurer:
        measurer.load(workload)
        for number in range(12):
            found = measurer.measure(scale(workload, f"// {number}"), best=1e-9)
            assert found.outcome is Outcome.RIGHT, found
        assert 3 <= measurer.children <= 12


def test_a_slow_candidate_is_timed_few_times(measurer: Measurer, workload: Workload) -> None:
    measurer.load(workload)
    found = measurer.measure(scale(workload), best=1e-9)
    assert found.timing is not None
    assert found.timing.repeats == LIMITS.few_repeats


def test_a_candidate_is_noted_before_it_is_run_and_closing_ends_the_child(
    device: Device, profile: DeviceProfile, workload: Workload
) -> None:
    noted: list[str] = []
    with Measurer(device.spec, profile, LIMITS, begin=lambda c: noted.append(c.id)) as measurer:
        measurer.load(workload)
        made = scale(workload)
        measurer.measure(made)
        measurer.measure(made)
        measurer.measure(honest.candidate(workload, kinds.DIVERGENT_BARRIER, groups=N // 64))
        pid = measurer.pid
    assert noted == [made.id], "and one that never reaches the child is not"
    assert pid is not None
    assert has_ended(pid), "closing ends the child"


def test_what_is_prepared_is_built_beside_and_blamed_alone(
    device: Device, profile: DeviceProfile, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    with Measurer(device.spec, profile, LIMITS, command=compiler_abort.COMMAND) as measurer:
        assert measurer.ahead == 1
        measurer.load(workload)
        made = [scale(workload, f"// {uuid4()}") for _ in range(60)]  # no cache has them
        bad = scale(workload, compiler_abort.MARK)
        waited = []
        for now, following in pairwise(made):
            measurer.prepare(following)
            assert measurer.measure(now).outcome is Outcome.RIGHT
            waited.append(measurer.spent["build"])
            if len(waited) >= 5 and min(waited) < 0.02:
                break  # a busy machine needs some more to have one built in time
        assert min(waited) < 0.02, "none was built while the one before was measured"
        measurer.prepare(bad)
        while measurer.children == 1:  # until the build beside has come to it, however busy the machine is
            assert measurer.measure(following).outcome is Outcome.RIGHT
        assert measurer.children == 2, "the child died of the prepared one"
        assert measurer.measure(bad).outcome is Outcome.BUILD


def test_the_child_dies_with_its_parent(
    device: Device, profile: DeviceProfile, workload: Workload, cache_dir: Path, tmp_path: Path
) -> None:
    """Killed outright, while the child hangs in the driver and cannot notice by itself."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import pathlib, sys\n"
        "from honed.machine import devices, peaks\n"
        "from honed.tuner.measure.candidate import MeasureLimits\n"
        "from honed.tuner.measure.measurer import Measurer\n"
        "from tests.tuner.liars import honest, kinds\n"
        "task = honest.scale(pathlib.Path(sys.argv[1]))\n"
        "device = devices.select(sys.argv[2])\n"
        "profile = peaks.load_or_measure(device, sys.argv[3])\n"
        "with Measurer(device.spec, profile, MeasureLimits(run_seconds=60)) as measurer:\n"
        "    measurer.load(task)\n"
        "    print(measurer.pid, flush=True)\n"
        "    measurer.measure(honest.candidate(task, kinds.ENDLESS, groups=64))\n"
    )
    root = Path(__file__).parents[3]
    parent = subprocess.Popen(
        [sys.executable, script, tmp_path / "task", device.spec, cache_dir],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=root,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: has_ended(pid), "the child to end")


def test_tensors_that_do_not_fit_the_workload_are_refused(
    measurer: Measurer, workload: Workload, tmp_path: Path
) -> None:
    task = honest.scale(tmp_path / "t", 64)
    np.save(task.folder / "1.0.npy", np.zeros(65, np.float32))
    with pytest.raises(InvalidArgument, match=r"1\.0\.npy is float32\[65\]"):
        measurer.load(task)
    measurer.load(workload)
    assert measurer.measure(scale(workload)).outcome is Outcome.RIGHT


def test_a_device_that_is_not_there(profile: DeviceProfile, workload: Workload) -> None:
    with Measurer("no such device", profile, LIMITS) as measurer, pytest.raises(DeviceError, match="no such"):
        measurer.load(workload)


def test_peaks_must_be_known(device: Device) -> None:
    with pytest.raises(InvalidArgument, match="peaks"):
        Measurer(device.spec, replace(device.profile, peaks=None))


def test_the_child_needs_no_compiler() -> None:
    code = "import sys, honed.tuner.measure.child; sys.exit('tvm' in sys.modules or 'onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
