"""kill -9 at random moments of real tuning runs: nothing that was reported is lost (see benchmarks.kill)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.kill import VICTIMS, kill_often

from honed.machine import devices

pytestmark = [pytest.mark.tvm, pytest.mark.opencl, pytest.mark.slow]


def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    if not devices.discover():
        pytest.skip("this machine has no OpenCL device")
    story = kill_often(tmp_path, 4, random.Random(4), list(VICTIMS))
    assert story.wrong == []
    assert story.victims.total() == 4
