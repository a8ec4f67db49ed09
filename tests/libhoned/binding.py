"""libhoned called from Python, each function by its name without `honed_`; the least that its tests need."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "libhoned" / "include" / "honed.h"
CODES = {
    name: int(number) for name, number in re.findall(r"HONED_([A-Z_0-9]+) = (\d+)[,\s]", HEADER.read_text())
}
FP32 = CODES["FP32"]


def build(folder: Path, *variables: str) -> None:
    """The library in a folder, as its Makefile makes it."""
    make = ["make", "-s", "-C", str(ROOT / "libhoned"), f"BUILD={folder}", *variables]
    subprocess.run(make, check=True, env={k: v for k, v in os.environ.items() if k != "MAKEFLAGS"})


def functions() -> dict[str, str]:
    """Every function that the header declares, and what it returns."""
    declared = re.findall(r"^HONED_API (?:HONED_MUST_CHECK )?([\w ]+?\**)\s*(honed_\w+)\(", _stars(), re.M)
    return {name: kind.strip() for kind, name in declared}


def _stars() -> str:
    return re.sub(r"(\w) \*(honed_)", r"\1* \2", HEADER.read_text())


_KINDS: dict[str, Any] = {
    "const char*": ctypes.c_char_p,
    "size_t": ctypes.c_size_t,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "int": ctypes.c_int,
    "honed_code": ctypes.c_int,
    "honed_type": ctypes.c_int,
    "void": None,
    "const int64_t*": ctypes.POINTER(ctypes.c_int64),
}


class Library:
    """`library.describe(...)` is honed_describe; pointers are integers, or None."""

    def __init__(self, folder: Path) -> None:
        self._c = ctypes.CDLL(str(folder / "libhoned.so.0"))
        for name, kind in functions().items():
            getattr(self._c, name).restype = _KINDS.get(kind, ctypes.c_void_p)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._c, f"honed_{name}")

        def call(*arguments: Any) -> Any:
            given = function(*map(_argument, arguments))
            return given.decode() if isinstance(given, bytes) else given

        return call


def _argument(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list):  # a shape
        return (ctypes.c_int64 * len(value))(*value)
    if isinstance(value, int):  # as wide as any parameter is
        return ctypes.c_uint64(value % 2**64)
    return value


def lacking() -> list[str]:
    """What this machine lacks to build it."""
    missing = [name for name in ("gcc", "make") if shutil.which(name) is None]
    parser = Path("/usr/include/msgpack/unpack_template.h")
    return missing if parser.exists() else [*missing, "libmsgpack-dev"]


def compiled(
    source: Path, made: Path, *flags: str, compiler: str = "gcc", library: Path | None = None
) -> Path:
    """A program with the library's own sources in it, so that sanitizers see both; warnings are errors.

    `library` is a folder of `objects`, with the same flags, in place of the sources.
    """
    own = sorted(library.glob("*.o") if library else (ROOT / "libhoned" / "src").glob("*.c"))
    _compile(compiler, [source, *own], "-o", str(made), *flags)
    return made


def objects(folder: Path, *flags: str) -> None:
    """The library's sources, each compiled into the folder."""
    folder.mkdir()
    for source in (ROOT / "libhoned" / "src").glob("*.c"):
        _compile("gcc", [source], "-c", "-o", str(folder / f"{source.stem}.o"), *flags)


def _compile(compiler: str, sources: Sequence[Path], *flags: str) -> None:
    assert shutil.which(compiler)
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    options = ["-std=c99", "-O1", "-g", "-D_GNU_SOURCE", '-DHONED_LIBRARY_VERSION="test"', *warnings]
    command = [compiler, *options, f"-I{HEADER.parent}", *map(str, sources), *flags]
    subprocess.run(command, check=True)


SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
