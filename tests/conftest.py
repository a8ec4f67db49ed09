"""Fixtures for every part: the OpenCL devices there are."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from honed.runtime.devices import Device


# How long an example takes says more of the machine's load than of the code.
settings.register_profile("honed", deadline=None)
settings.load_profile("honed")


def pytest_configure() -> None:
    """Give Ctrl-C back to children: a shell that runs pytest in the background has all ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Output is buffered in the programs tested, as it is for users, whatever the environment says.
    os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `device` runs on every OpenCL device of the machine."""
    if "device" in metafunc.fixturenames:
        found = _devices()
        missing = pytest.param(
            None, marks=pytest.mark.skip(reason="this machine has no OpenCL device"), id="none"
        )
        params = [pytest.param(d, id=f"{i}-{d.profile.rules.family}") for i, d in enumerate(found)]
        metafunc.parametrize("device", params or [missing], scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs a device carries the marker `opencl`, so that -m can leave it out."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.opencl)


def _devices() -> list[Device]:
    try:
        import pyopencl  # noqa: F401
    except ImportError:
        return []
    from honed.runtime import devices

    return devices.discover()
