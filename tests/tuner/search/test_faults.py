"""The fault part of the NVIDIA benchmark, on the devices of this machine: what writes far crashes PoCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from tests.tuner.nvidia import faults

pytestmark = [pytest.mark.tvm, pytest.mark.slow]


def test_writers_out_of_bounds_end_in_quarantine_and_the_session_goes_on(
    device: Device, profile: DeviceProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "SHAPE", (16, 64, 32))
    story = faults.run(device.spec, profile, tmp_path, None)
    assert [trial["outcome"] for trial in story["trials"]][::3] == ["right", "right"]
    assert sorted(story["quarantine"]) == ['["far"]', '["near"]']
    outcomes = {row["trace"]: row["outcome"] for row in story["records"]}
    assert outcomes['["near"]'] == "wrong"
    assert outcomes['["far"]'] in ("not-run", "faulted")
    assert story["children"] == 3
