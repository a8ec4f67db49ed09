"""The installed OpenCL drivers, as the loader finds them, and variables to load one of them alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from .files import system_text

Stack = Literal["libmali", "rusticl", "pocl", "nvidia", "other"]
_STACKS: tuple[tuple[str, Stack], ...] = (
    ("rusticlopencl", "rusticl"),
    ("mali", "libmali"),
    ("pocl", "pocl"),
    ("nvidia", "nvidia"),
)
_FOLDER = Path("/etc/OpenCL/vendors")


def icd_files(root: Path, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (ICD file, library that it names) in the loader's order, as ocl-icd does (libOpenCL(7)).

    OCL_ICD_VENDORS names a folder, one .icd file, or a library itself; OPENCL_VENDOR_PATH a folder.
    """
    vendors = environ.get("OCL_ICD_VENDORS", "")
    folder_name = vendors or environ.get("OPENCL_VENDOR_PATH", "") or str(_FOLDER)
    place = root / folder_name.lstrip("/")
    if vendors and not os.path.isdir(place):
        if not vendors.endswith(".icd"):
            return [("$OCL_ICD_VENDORS", vendors)]
        if "/" not in vendors:
            place = root / str(_FOLDER).lstrip("/") / vendors
        files = [place]
    else:
        files = sorted(place.glob("*.icd"))
    named = [(file, next(iter(_lines(file)), "")) for file in files]
    found = [(f"/{file.relative_to(root)}", library) for file, library in named]
    extra = environ.get("OCL_ICD_FILENAMES", "")
    return found + [("$OCL_ICD_FILENAMES", library) for library in extra.split(":") if library]


def stack_of(library: str) -> Stack:
    """Return the OpenCL implementation of a library, by its name."""
    name = library.rpartition("/")[2].casefold()
    return next((stack for part, stack in _STACKS if part in name), "other")


def driver_environments(environ: Mapping[str, str], root: Path = Path("/")) -> list[dict[str, str]]:
    """Return sets of environment variables for processes, so that PoCL never shares one with other drivers.

    PoCL loads LLVM, as do rusticl and others. If PoCL is alone or not installed, there is one set, without
    any variable: a process may load all drivers. Otherwise there is one for each driver, which loads that
    driver alone; a driver that is named twice counts once.
    """
    files: dict[str, str] = {}
    for file, library in icd_files(root, environ):
        if library:
            files.setdefault(library, file)
    stacks = set(map(stack_of, files))
    if "pocl" not in stacks or len(stacks) == 1:
        return [{}]
    no_others = {"OCL_ICD_FILENAMES": ""} if environ.get("OCL_ICD_FILENAMES") else {}
    return [
        {"OCL_ICD_VENDORS": library if file.startswith("$") else file, **no_others}
        for library, file in files.items()
    ]


def _lines(path: Path) -> list[str]:
    """Return the lines of a text file that are neither empty nor comments."""
    text = system_text(path) or ""
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
