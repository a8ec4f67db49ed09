"""The devices that kernels are executed on: those of this machine, and rusticl in a root of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from honed.machine import devices
from honed.protocol.errors import DeviceError

ROOT = Path("/var/cache/honed-rusticl")
CLONE = Path(__file__).parents[2]
_MODULE = "benchmarks.devices.running"
# The driver llvmpipe has halves, but reports them only with this variable (facts/testbeds.md).
_RUSTICL = {
    "RUSTICL_ENABLE": "llvmpipe",
    "RUSTICL_FEATURES": "fp16",
    "OCL_ICD_VENDORS": "/etc/OpenCL/vendors/rusticl.icd",
    "MESA_SHADER_CACHE_DISABLE": "true",
}
# The clone, the compiled files and the kernel's folders in a root: mounts of this process and its children.
_ENTER = (
    'root=$1; shift; for f in "$CLONE" "$FILES" /proc /dev; do mkdir -p "$root$f"; '
    'mount --bind "$f" "$root$f"; done; exec chroot "$root" "$@"'
)


@dataclass(frozen=True, slots=True)
class Bed:
    """A device: its name in tables, its spec, and the command that executes files there (`running`)."""

    name: str
    spec: str
    command: tuple[str, ...]


def here(specs: Sequence[str], files: Path) -> list[Bed]:
    """Return this machine's devices that `specs` name, or all without any; raise as `devices.select`."""
    found = [devices.select(spec) for spec in specs] if specs else devices.discover()
    command = (sys.executable, "-m", _MODULE, str(files))
    return [Bed(one.profile.identity.platform, one.spec, command) for one in found]


def rusticl(root: Path, files: Path) -> Bed:
    """Return rusticl on llvmpipe in the root that `benchmarks/devices/build` makes; raise DeviceError."""
    if not (root / "etc/OpenCL/vendors/rusticl.icd").exists():
        raise DeviceError(f"rusticl is not in {root}; make it with `benchmarks/devices/build {root}`")
    if os.geteuid() != 0:
        raise DeviceError(f"rusticl runs in a root of its own, {root}; run this as root")
    path = ":".join(str(CLONE / part) for part in ("", "daemon", "runtime", "tuner"))
    variables = _RUSTICL | {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": path}
    inside = ("/usr/bin/env", "-i", *(f"{k}={v}" for k, v in variables.items()))
    enter = ("env", f"CLONE={CLONE}", f"FILES={files}", "unshare", "--mount", "sh", "-eu", "-c", _ENTER, "sh")
    command = (*enter, str(root), *inside, "/usr/bin/python3", "-m", _MODULE, str(files))
    return Bed("rusticl on llvmpipe", "llvmpipe", command)
