from __future__ import annotations

from dataclasses import replace

import pytest

from honed.machine.devices import Device


def separate(device: Device) -> Device:
    """The same device, with its memory treated as its own: copies instead of maps."""
    limits = replace(device.profile.limits, host_unified=False)
    return replace(device, profile=replace(device.profile, limits=limits))


@pytest.fixture(params=["as it is", "copying"])
def either(request: pytest.FixtureRequest, device: Device) -> Device:
    return separate(device) if request.param == "copying" else device
