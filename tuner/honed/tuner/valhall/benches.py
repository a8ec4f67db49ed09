"""The devices whose kernels can be judged without them, and how what is predicted of them is marked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from honed.machine import profilefile
from honed.machine.profile import DeviceProfile

BENCHES = {"mali-g610": Path(__file__).with_name("mali-g610.toml")}
# No OpenCL platform has this name, so that records of predictions are never taken for those of a board.
PLATFORM = "honed's Valhall bench"
DRIVER = "predicted by Mesa's Valhall compiler"


def predicted(bench: str) -> DeviceProfile:
    """The profile of one of BENCHES, with an identity that says that its times are predicted."""
    profile = profilefile.load(BENCHES[bench])
    identity = replace(profile.identity, platform=PLATFORM, driver_version=DRIVER, kernel_driver="")
    return replace(profile, identity=identity)


def marked(name: str, bench: str) -> str:
    """What a model tuned on a bench is called in the records: its history is not that of a served one."""
    return f"{name} ({bench}, predicted)"
