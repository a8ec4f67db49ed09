"""PoCL for tests: what it calls its devices (cpu-... since 4.0), and PoCL as two drivers that clash."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_LIST = """
import pyopencl

for platform in pyopencl.get_platforms():
    for device in platform.get_devices():
        print(device.name)
"""


def _names() -> tuple[str, str]:
    """Return how the names begin of the device of all processors, and of that of one."""
    command, both = [sys.executable, "-c", _LIST], {**os.environ, "POCL_DEVICES": "basic pthread"}
    found = subprocess.run(command, env=both, check=False, capture_output=True, text=True).stdout.split("\n")
    newer = next((name for name in found if name.startswith("cpu-") and "minimal" not in name), "")
    return ("-".join(newer.split("-")[:2]), "cpu-minimal") if newer else ("pthread", "basic")


ALL, ONE = _names()


# Two drivers that end a process which loads both: PoCL under the names of PoCL and of rusticl.
_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
__attribute__((constructor)) static void load(void) {
  if (dlopen(OTHER, RTLD_NOLOAD | RTLD_LAZY)) abort();
  setenv("POCL_DEVICES", DEVICE, 1);
}
"""


def two_drivers(folder: Path) -> dict[str, str]:
    """The environment of a machine with both: a "pthread" of the one and a "basic" of the other.

    `folder` has an ICD file of each, "pthread.icd" and "basic.icd".
    """
    pocl, compiler = ctypes.util.find_library("pocl"), shutil.which("cc")
    if pocl is None or compiler is None:
        pytest.skip("this needs PoCL and a C compiler")
    libraries = {"pthread": folder / "libpocl-one.so", "basic": folder / "libRusticlOpenCL.so.1"}
    for (device, library), other in zip(libraries.items(), reversed(libraries.values()), strict=True):
        macros = [f'-DDEVICE="{device}"', f'-DOTHER="{other}"']
        command = [compiler, "-shared", "-fPIC", "-xc", "-", "-o", str(library), *macros]
        subprocess.run(
            [*command, "-xnone", "-Wl,--no-as-needed", f"-l:{pocl}"], input=_DRIVER.encode(), check=True
        )
        (folder / f"{device}.icd").write_text(f"{library}\n")
    kept = {name: value for name, value in os.environ.items() if name not in ("OCL_ICD_FILENAMES",)}
    return {**kept, "OCL_ICD_VENDORS": str(folder), "OPENCL_VENDOR_PATH": str(folder)}
