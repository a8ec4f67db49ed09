"""What figures are kept under: the device and the version of what made the kernels."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

from honed.jobs import priorfile
from honed.machine.profile import DeviceIdentity

from .records import Setup

# Raised when the same trace would give another kernel than before, or a task another default schedule.
_LOWERING = 8


def setup_for(identity: DeviceIdentity) -> Setup:
    """The setup of this installation on a device."""
    return Setup(device=identity, compiler=f"tvm {version('apache-tvm')}, lowering {_LOWERING}")


def for_defaults(setup: Setup, family: str) -> Setup:
    """What times of default schedules are kept under: an own prior chooses others than the one that ships."""
    own = priorfile.own(family)
    return setup if own is None else replace(setup, compiler=f"{setup.compiler}, prior {own.digest}")
