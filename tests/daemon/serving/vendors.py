"""OpenCL drivers whose devices come and go while a daemon runs."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

# PoCL has the devices that POCL_DEVICES names, and builds kernels with POCL_EXTRA_BUILD_FLAGS. It reads them
# when it is first asked for devices and kernels.
_CODE = """#include <stdlib.h>
__attribute__((constructor)) static void choose(void) {
  setenv("POCL_DEVICES", DEVICES, 1);
  setenv("POCL_EXTRA_BUILD_FLAGS", FLAGS, 1);
}
"""


class Vendors:
    """A folder of ICD files of our own: the driver in it is PoCL with the devices that were chosen last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._vendors = folder / "vendors"
        self._vendors.mkdir(parents=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """For processes that should find it."""
        return {"OCL_ICD_VENDORS": str(self._vendors), "OPENCL_VENDOR_PATH": str(self._vendors)}

    def have(self, *devices: str, define: str = "") -> None:
        """Processes that start from now on find these, of "pthread" and "basic".

        `define` is a macro that kernels see there.
        """
        library = self._folder / f"lib{'-'.join((*devices, define))}.so"
        if not library.exists():
            self._build(library, " ".join(devices), f"-D{define}" if define else "")
        fresh = self._folder / "fresh.icd"
        fresh.write_text(f"{library}\n")
        os.replace(fresh, self._vendors / "test.icd")

    def _build(self, library: Path, devices: str, flags: str) -> None:
        pocl, compiler = ctypes.util.find_library("pocl"), shutil.which("cc")
        if pocl is None or compiler is None:
            pytest.skip("this needs PoCL and a C compiler")
        macros = [f'-DDEVICES="{devices}"', f'-DFLAGS="{flags}"']
        command = [compiler, "-shared", "-fPIC", "-xc", "-", "-o", str(library), *macros]
        subprocess.run(
            [*command, "-xnone", "-Wl,--no-as-needed", f"-l:{pocl}"], input=_CODE.encode(), check=True
        )
