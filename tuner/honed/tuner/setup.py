"""What figures are kept under: the device and the version of what made the kernels."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

from honed.machine.families import FAMILIES
from honed.machine.profile import DeviceIdentity

from .records import Setup
from .search.shipped import chosen

# The OpenCL platform of devices whose times are predicted (`honed.valhall`). None has this name, so that
# records of predictions are never taken for those of a board.
PREDICTED = "honed's Valhall bench"
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


def tuned_as(source: str, setup: Setup) -> str:
    """What a model is tuned as, by its file's SHA-256: where any of it changes, it is looked at again.

    Priors of all families are in it, for a device's identity does not tell its family.
    """
    priors = [prior.digest for prior in map(chosen, sorted(FAMILIES)) if prior]
    return " ".join((source, setup.device_key, setup.driver, setup.compiler, *priors))
