"""Reads everything the doctor judges: files beneath a root folder, and what children answer."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

from honed.jobs import priorfile
from honed.protocol.errors import InvalidArgument

from . import probe
from .accounts import read_names
from .machine import lines, read_machine
from .readings import (
    Account,
    Daemon,
    Ended,
    Folder,
    IcdFile,
    OpenCL,
    OpenCLLoader,
    OwnPrior,
    Package,
    Part,
    Readings,
    Stack,
)

LOADER = "libOpenCL.so.1"
VARIABLES = (
    "HONED_DEVICE",
    "LD_LIBRARY_PATH",
    "OCL_ICD_FILENAMES",
    "OCL_ICD_VENDORS",
    "OPENCL_VENDOR_PATH",
    "RUSTICL_DEVICE_TYPE",
    "RUSTICL_ENABLE",
    "RUSTICL_FEATURES",
)
_VENDORS = Path("/etc/OpenCL/vendors")
_STACKS: tuple[tuple[str, Stack], ...] = (
    ("rusticlopencl", "rusticl"),
    ("mali", "libmali"),
    ("pocl", "pocl"),
    ("nvidia", "nvidia"),
)
_PACKAGES: dict[Part, dict[str, str]] = {  # part -> name -> the only version known to work, or ""
    "runtime": {"honed": "", "numpy": "", "msgpack": ""},
    "daemon": {"pyopencl": "", "rich": "", "systemd-python": ""},
    "tuner": {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1", "onnx": ""},
}


class Prober(Protocol):
    """Asks OpenCL; `children` does it for this machine."""

    def library(self, library: str) -> tuple[Ended, str, str]:
        """How loading a library ended, the path it came from, and the error."""

    def platforms(self) -> OpenCL:
        """Platforms and devices."""


@dataclass(frozen=True, slots=True)
class Children:
    """The prober of the machine we run on: one child per question, each with a deadline."""

    environ: Mapping[str, str]

    def library(self, library: str) -> tuple[Ended, str, str]:
        """Load it in a child."""
        answer = probe.load_library(library, self.environ)
        return answer.ended, answer.path, answer.error

    def platforms(self) -> OpenCL:
        """List them in a child."""
        return probe.list_platforms(self.environ)


def gather(
    *,
    root: Path,
    environ: Mapping[str, str],
    uid: int,
    gids: Iterable[int],
    prober: Prober,
    folders: Iterable[tuple[str, Path]],
    daemon: Daemon,
) -> Readings:
    """All readings of the system beneath `root`; `folders` are (purpose, path) of what honed writes to."""
    names = read_names(root)
    files = icd_files(root, environ)
    with ThreadPoolExecutor(max_workers=2) as pool:  # boards have few cores, and drivers are large
        opencl = pool.submit(prober.platforms)
        loaded = pool.map(lambda name: _load(prober, name), [LOADER, *(library for _, library in files)])
        ended, path, error = next(loaded)
        icds = tuple(
            IcdFile(path=file, library=library, stack=stack_of(library), ended=how, error=why)
            for (file, library), (how, _, why) in zip(files, loaded, strict=True)
        )
    return Readings(
        user=names.running(uid, frozenset(gids)),
        service_user=_other(names.named("honed"), uid),
        groups=tuple(g for g in ("video", "render", "honed", "honed-admin") if names.has_group(g)),
        environment={name: environ[name] for name in VARIABLES if environ.get(name)},
        loader=OpenCLLoader(path=path if ended == "ok" else "", error=error),
        icds=icds,
        opencl=opencl.result(),
        machine=read_machine(root, names),
        folders=tuple(folder(purpose, place) for purpose, place in folders),
        daemon=daemon,
        python=platform.python_version(),
        venv=sys.prefix != sys.base_prefix,
        packages=packages(),
        priors=tuple(_own_priors(root, environ)),
    )


def _own_priors(root: Path, environ: Mapping[str, str]) -> Iterator[OwnPrior]:
    for folder in priorfile.own_folders(environ):
        for path in sorted((root / str(folder).lstrip("/")).glob(f"*{priorfile.SUFFIX}")):
            named = f"/{path.relative_to(root)}"
            try:
                yield OwnPrior(path=named, digest=priorfile.usable(path).digest, error="")
            except InvalidArgument as error:
                yield OwnPrior(path=named, digest="", error=str(error))


def icd_files(root: Path, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """(ICD file, library it names) in the loader's order, as ocl-icd reads its variables (libOpenCL(7)).

    OCL_ICD_VENDORS names a folder, one .icd file, or a library itself; OPENCL_VENDOR_PATH a folder.
    """
    vendors = environ.get("OCL_ICD_VENDORS", "")
    folder_name = vendors or environ.get("OPENCL_VENDOR_PATH", "") or str(_VENDORS)
    place = root / folder_name.lstrip("/")
    if vendors and not os.path.isdir(place):
        if not vendors.endswith(".icd"):
            return [("$OCL_ICD_VENDORS", vendors)]
        if "/" not in vendors:
            place = root / str(_VENDORS).lstrip("/") / vendors
        files = [place]
    else:
        files = sorted(place.glob("*.icd"))
    named = [(file, next(iter(lines(file)), "")) for file in files]
    found = [(f"/{file.relative_to(root)}", library) for file, library in named]
    extra = environ.get("OCL_ICD_FILENAMES", "")
    return found + [("$OCL_ICD_FILENAMES", library) for library in extra.split(":") if library]


def stack_of(library: str) -> Stack:
    """Whose OpenCL a library is, by its name."""
    name = library.rpartition("/")[2].casefold()
    return next((stack for part, stack in _STACKS if part in name), "other")


def folder(purpose: str, path: Path) -> Folder:
    """What is known of a folder, or of the nearest one above it that exists."""
    exists = os.path.isdir(path)  # Path.is_dir raises where a folder above may not be searched
    nearest = next((p for p in (path, *path.parents) if os.path.isdir(p)), Path("/"))
    return Folder(
        path=str(path),
        purpose=purpose,
        exists=exists,
        writable=os.access(nearest, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(nearest).free,
    )


def packages() -> tuple[Package, ...]:
    """Versions from the packages' metadata; nothing is imported."""
    tuner = importlib.util.find_spec("honed.tuner")
    bundle = [str(Path(tuner.origin).with_name("bundled"))] if tuner is not None and tuner.origin else []
    found = [
        Package(
            name=name, part=part, version=_version(name, bundle if part == "tuner" else []), wanted=wanted
        )
        for part, names in _PACKAGES.items()
        for name, wanted in names.items()
    ]
    version = None if tuner is None else _version("honed-tuner") or _version("honed") or "present"
    return (*found, Package(name="honed-tuner", part="tuner", version=version, wanted=""))


def _load(prober: Prober, library: str) -> tuple[Ended, str, str]:
    if not library:  # dlopen("") would give the program itself
        return "failed", "", "it names no library"
    return prober.library(library)


def _version(name: str, first: Sequence[str] = ()) -> str | None:
    """The version of an installed distribution; folders in `first` are looked through before Python's own."""
    found = metadata.distributions(name=name, path=[*first, *sys.path])
    return next((distribution.version for distribution in found), None)


def _other(account: Account | None, uid: int) -> Account | None:
    return None if account is None or account.uid == uid else account
