"""The target that schedules are made for says what the device profile says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from honed.machine.profile import DeviceProfile
from honed.tuner.lower.target import target_for
from tests.runtime.builder import PROFILE

pytestmark = pytest.mark.tvm


def _profile(family: str = "gpu", threads: int = 256, group: int = 256, local: int = 32768) -> DeviceProfile:
    return replace(
        PROFILE,
        rules=replace(PROFILE.rules, family=family, max_threads=threads),
        limits=replace(PROFILE.limits, max_work_group_size=group, local_mem_bytes=local),
    )


@pytest.mark.parametrize(("threads", "group", "expected"), [(256, 1024, 256), (384, 128, 128), (64, 64, 64)])
def test_groups_keep_to_the_device_and_to_its_rules(threads: int, group: int, expected: int) -> None:
    attrs = target_for(_profile(threads=threads, group=group)).attrs
    assert int(attrs["max_num_threads"]) == expected
    assert int(attrs["max_threads_per_block"]) == expected


def test_local_memory_is_the_device_s() -> None:
    assert int(target_for(_profile(local=12345)).attrs["max_shared_memory_per_block"]) == 12345


@pytest.mark.parametrize("family", ["mali", "gpu", "cpu"])
def test_no_family_has_warps_in_step(family: str) -> None:
    target = target_for(_profile(family=family))
    assert str(target.kind.name) == "opencl"
    assert int(target.attrs["thread_warp_size"]) == 1
    assert ("mali" in str(target)) == (family == "mali")


def test_nothing_is_of_the_machine_that_compiles() -> None:
    host = target_for(PROFILE).host
    assert str(host.kind.name) == "llvm"
    assert "mcpu" not in str(host)
