"""What figures are kept under: the device and the version of what made the kernels."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

from honed.machine.profile import DeviceIdentity

from .records import Setup
from .search.shipped import chosen

# Raised when the same trace would give another kernel than before, or a task another default schedule for
# another reason than its family's prior.
_LOWERING = 8


def setup_for(identity: DeviceIdentity) -> Setup:
    """The setup of this installation on a device."""
    return Setup(device=identity, compiler=f"tvm {version('apache-tvm')}, lowering {_LOWERING}")


def for_defaults(setup: Setup, family: str) -> Setup:
    """What times of default schedules are kept under: which those are is for the family's prior to say."""
    prior = chosen(family)
    return setup if prior is None else replace(setup, compiler=f"{setup.compiler}, prior {prior.digest}")
