#!/usr/bin/python3
"""Writes which Debian packages the libraries of a bundle need.

needs.py FOLDER SUBSTVARS MACHINE [GLIBC]

MACHINE is x86_64 or aarch64: a library made for another is an error. dpkg-shlibdeps would want packages of
the target machine installed here; what libraries name is read by readelf, which knows every machine. One that
nobody provides is an error.
GLIBC is the newest minor version that they may need, by default that of wheels.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# Libraries of Debian and the package of each. Wheels are made for glibc 2.28 (manylinux_2_28) at the newest.
_PROVIDED = {
    "ld-linux-x86-64.so.2": "libc6 (>= 2.28)",
    "ld-linux-aarch64.so.1": "libc6 (>= 2.28)",
    "libc.so.6": "libc6 (>= 2.28)",
    "libdl.so.2": "libc6 (>= 2.28)",
    "libm.so.6": "libc6 (>= 2.28)",
    "libpthread.so.0": "libc6 (>= 2.28)",
    "librt.so.1": "libc6 (>= 2.28)",
    "libgcc_s.so.1": "libgcc-s1 (>= 8)",
    "libgomp.so.1": "libgomp1 (>= 8)",
    "libstdc++.so.6": "libstdc++6 (>= 8)",
}
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
_GLIBC = re.compile(r"Name: GLIBC_2\.(\d+)")
_WHEELS_GLIBC = 28
_MACHINE = re.compile(r"^  Machine: +(.+)$", re.MULTILINE)


def needs(folder: Path, machine: str, newest: int = _WHEELS_GLIBC) -> set[str]:
    """Packages with their versions; raises ValueError where a library is nowhere or of another machine."""
    ours = {path.name for path in folder.rglob("*.so*")}
    real = {path.name for path in folder.rglob("*.so*") if not path.is_symlink()}
    links = {path.readlink().name for path in folder.rglob("*.so*") if path.is_symlink()}
    packages, glibc = {_PROVIDED[name] for name in links - real}, 0
    for path in sorted(folder.rglob("*.so*")):
        if path.is_symlink():
            continue
        told = subprocess.run(
            ["readelf", "--file-header", "--dynamic", "--version-info", "--wide", path],
            check=True,
            capture_output=True,
            text=True,
        )
        if _MACHINE.findall(told.stdout) != [_MACHINES[machine]]:
            raise ValueError(f"{path} is not made for {machine}")
        glibc = max(glibc, *map(int, _GLIBC.findall(told.stdout)), 0)
        if glibc > newest:
            raise ValueError(f"{path} needs a glibc newer than 2.{newest}; raise that here")
        for library in _NEEDED.findall(told.stdout):
            if library in _PROVIDED:
                packages.add(_PROVIDED[library])
            elif library not in ours:
                raise ValueError(f"{path} needs {library}, which neither Debian nor the bundle has")
    if glibc > _WHEELS_GLIBC:
        packages = {each for each in packages if not each.startswith("libc6 ")} | {f"libc6 (>= 2.{glibc})"}
    return packages


def main(folder: str, substvars: str, machine: str, newest: str = str(_WHEELS_GLIBC)) -> None:
    """As the module says."""
    with Path(substvars).open("a") as file:
        print("bundle:Depends=" + ", ".join(sorted(needs(Path(folder), machine, int(newest)))), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
