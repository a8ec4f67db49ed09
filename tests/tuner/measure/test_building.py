"""The pool of building children: what it builds is found in the cache, and what breaks it breaks it alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner.measure.candidate import Candidate, MeasureLimits, Workload
from honed.tuner.measure.measurer import Measurer
from honed.tuner.measure.process import Builders
from honed.tuner.records.rows import Outcome
from tests.tuner.liars import honest

N = honest.N
CRASH = honest.SCALE.replace("{\n", "{\n  *(volatile __global int*)(16 + get_local_size(1)) = 1;\n", 1)


def candidate(workload: Workload, number: int, source: str = honest.SCALE) -> Candidate:
    told_apart = f"{source}__constant int number = {number};\n"  # PoCL's cache knows no comments
    made = honest.candidate(workload, told_apart, groups=N // 64)
    return replace(made, id=str(number))


@pytest.fixture
def builders(device: Device, tmp_path: Path) -> Iterator[Builders]:
    pool = Builders(device.spec, 2, launch=True, folder=tmp_path, seconds=60.0, memory_bytes=1 << 30)
    yield pool
    pool.close()


def kept(builders: Builders) -> set[Path]:
    """Folders of what the driver compiled for the size of a work-group."""
    return {path.parent for path in builders.cache.rglob("*.so")}


@pytest.mark.slow
def test_what_is_built_lies_in_the_cache_until_it_is_forgotten(
    builders: Builders, workload: Workload
) -> None:
    wanted = [candidate(workload, n) for n in range(5)]
    builders.submit(wanted, workload)
    builders.submit(wanted[:2], workload)
    builders.wait()
    assert len(kept(builders)) == len(wanted)
    assert builders.was_submitted(wanted[0])
    builders.forget()
    assert not kept(builders)
    assert not builders.was_submitted(wanted[0])


@pytest.mark.slow
def test_a_crash_ends_one_child_and_no_other_candidate(builders: Builders, workload: Workload) -> None:
    wanted = [candidate(workload, n, CRASH if n in (0, 3) else honest.SCALE) for n in range(6)]
    builders.submit(wanted, workload)
    builders.wait(wanted[5])
    builders.wait()
    assert len(kept(builders)) >= 4


@pytest.mark.slow
def test_a_candidate_built_ahead_gets_the_same_verdict(
    device: Device, profile: DeviceProfile, workload: Workload
) -> None:
    with Measurer(device.spec, profile, MeasureLimits(run_seconds=10.0), builders=1) as measurer:
        measurer.load(workload)
        wanted = [candidate(workload, n, CRASH if n == 1 else honest.SCALE) for n in range(3)]
        measurer.build(wanted)
        outcomes = [measurer.measure(one).outcome for one in wanted]
        assert outcomes[0] is outcomes[2] is Outcome.RIGHT
        assert outcomes[1] in (Outcome.CRASH, Outcome.BUILD)
        measurer.forget()
        assert measurer.measure(candidate(workload, 7)).outcome is Outcome.RIGHT, "it was not built ahead"
