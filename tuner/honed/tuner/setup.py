"""Keys of recorded figures: the device and the version of what made the kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from honed.jobs import priorfile
from honed.jobs.priorfile import SUFFIX, PriorFile
from honed.machine.families import FAMILIES
from honed.machine.profile import DeviceIdentity

from .records.rows import MeasurementSetup

# The OpenCL platform of devices whose times are predicted (`honed.valhall`). No real platform has this name,
# so records of predictions are never used for a board.
PREDICTED = "honed's Valhall bench"
# Raised when the same trace would give another kernel, or a task another default schedule for another reason
# than its family's prior.
_LOWERING = 12
PRIORS = Path(__file__).parent / "search" / "priors"


def setup_for(identity: DeviceIdentity) -> MeasurementSetup:
    """Return the setup of this installation on a device."""
    return MeasurementSetup(device=identity, compiler=f"tvm {version('apache-tvm')}, lowering {_LOWERING}")


def for_defaults(setup: MeasurementSetup, family: str) -> MeasurementSetup:
    """Return the setup under which times of default schedules are kept.

    The family's prior decides which schedules are the defaults, so its digest is part of the setup.
    """
    prior = _prior(family)
    return setup if prior is None else replace(setup, compiler=f"{setup.compiler}, prior {prior.digest}")


def tuning_key(source: str, setup: MeasurementSetup) -> str:
    """Return the key under which a model counts as tuned, from its file's SHA-256.

    A model whose key changes is examined again. The key holds the priors of all families, because a device's
    identity does not tell its family.
    """
    priors = [prior.digest for prior in map(_prior, sorted(FAMILIES)) if prior]
    return " ".join((source, setup.device_key, setup.driver, setup.compiler, *priors))


@cache
def load_shipped_prior(family: str) -> PriorFile | None:
    """Return the prior of a family that ships with honed; None where there is none."""
    path = PRIORS / f"{family}{SUFFIX}"
    return priorfile.usable(path) if path.exists() else None


def _prior(family: str) -> PriorFile | None:
    """Return the prior in use: an administrator's own, else the one that ships; None where there is none."""
    return priorfile.own(family) or load_shipped_prior(family)
