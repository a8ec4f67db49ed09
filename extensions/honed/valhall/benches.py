"""The devices whose kernels can be judged without them, and their profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from honed.machine import profilefile
from honed.machine.profile import DeviceProfile
from honed.tuner.setup import PREDICTED

BENCHES = {"mali-g610": Path(__file__).with_name("mali-g610.toml")}
DRIVER = "predicted by Mesa's Valhall compiler"


def predicted(bench: str) -> DeviceProfile:
    """The profile of one of BENCHES, with an identity that says that its times are predicted."""
    profile = profilefile.load(BENCHES[bench])
    identity = replace(profile.identity, platform=PREDICTED, driver_version=DRIVER, kernel_driver="")
    return replace(profile, identity=identity)
