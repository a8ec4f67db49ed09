"""The library as it is installed: what it exports, and programs that are built with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.daemon.conftest import SIZE, service, small_model
from tests.daemon.running import DEADLINE, Service

from .binding import HEADER, ROOT, SANITIZED, build, functions

__all__ = ["service", "small_model"]  # fixtures
HERE = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "infer.c"
X = np.arange(SIZE, dtype=np.float32)
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def symbols(path: Path) -> set[str]:
    told = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in told.stdout.splitlines()}


def test_what_the_header_declares_is_exported_and_nothing_else(built: Path) -> None:
    declared = {*functions(), "HONED_0"}
    assert len(declared) > 50
    assert symbols(built / "libhoned.so.0") == declared
    listed = (ROOT / "debian" / "libhoned0.symbols").read_text()
    versions = dict(re.findall(r"^ (\w+)@HONED_0 (\S+)$", listed, re.M))
    assert set(versions) == declared
    # The entry of each release since the one that brought the package.
    released, brought, _ = (ROOT / "debian" / "changelog").read_text().rpartition("libhoned0")
    assert brought
    assert set(versions.values()) <= set(re.findall(r"^honed \((\S+)\)", released, re.M))


def test_every_function_is_used_by_a_test_or_an_example() -> None:
    """Those of the binding are called without their prefix."""
    texts = [path.read_text() for path in [*HERE.glob("*.py"), *HERE.glob("*.c*"), EXAMPLE]]
    used = {name for text in texts for name in re.findall(r"\b(?:honed_|library\.)(\w+)", text)}
    assert {name.removeprefix("honed_") for name in functions()} <= used


def test_the_numbers_of_codes_and_types_never_change() -> None:
    text = HEADER.read_text()
    for name, number in {
        "OK": 0,
        "NOT_FOUND": 3,
        "INTERNAL": 11,
        "DISCONNECTED": 20,
        "FP32": 11,
        "FP64": 12,
    }.items():
        assert re.search(rf"\bHONED_{name} = {number}\b", text)


def installed(folder: Path, *variables: str) -> Path:
    """Installed below a folder as below /usr."""
    given = ["install", f"DESTDIR={folder}/root", "PREFIX=/usr", "LIBDIR=/usr/lib", "VERSION=9.8.7"]
    build(folder / "build", *given, *variables)
    return folder / "root"


def flags(root: Path) -> list[str]:
    """What pkg-config says."""
    environment = os.environ | {
        "PKG_CONFIG_LIBDIR": f"{root}/usr/lib/pkgconfig",
        "PKG_CONFIG_SYSROOT_DIR": str(root),
    }
    for variable in ("PKG_CONFIG_PATH", "PKG_CONFIG_ALLOW_SYSTEM_CFLAGS"):
        environment.pop(variable, None)
    command = ["pkg-config", "--cflags", "--libs", "honed"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    version = subprocess.run(
        ["pkg-config", "--modversion", "honed"], env=environment, capture_output=True, text=True, check=True
    )
    assert version.stdout == "9.8.7\n"
    return told.stdout.split()


def run(command: list[str], root: Path, service: Service, data: bytes = b"") -> bytes:
    environment = os.environ | {"LD_LIBRARY_PATH": f"{root}/usr/lib", "HONED_SOCKET": str(service.socket)}
    done = subprocess.run(
        command, env=environment, input=data, capture_output=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_example(command: list[str], root: Path, service: Service, folder: Path) -> None:
    (folder / "x.raw").write_bytes(X.tobytes())
    answer = run([*command, "small", f"x={folder}/x.raw"], root, service)
    np.testing.assert_array_equal(np.frombuffer(answer, np.float32), 2 * X + 1)


@pytest.mark.service
@pytest.mark.opencl
def test_programs_in_c_and_cpp_are_built_by_pkg_config(service: Service, tmp_path: Path) -> None:
    root = installed(tmp_path)
    assert os.readlink(root / "usr/lib/libhoned.so.0") == "libhoned.so.0.9.8.7"
    for number, (compiler, standard, source) in enumerate(
        [("gcc", "c99", EXAMPLE), ("g++", "c++17", HERE / "wrapper.cpp")]
    ):
        made = tmp_path / f"program{number}"
        subprocess.run(
            [compiler, f"-std={standard}", *WARNINGS, *SANITIZED, "-o", made, source, *flags(root)],
            check=True,
        )
    check_example([str(tmp_path / "program0")], root, service, tmp_path)
    assert run([str(tmp_path / "program1")], root, service).decode().splitlines()[-1] == "all is well"


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
@pytest.mark.skipif(not shutil.which(CROSS) or not shutil.which(EMULATOR), reason=f"no {CROSS} or {EMULATOR}")
def test_a_program_for_arm64_runs_emulated(service: Service, tmp_path: Path) -> None:
    root = installed(tmp_path, f"CC={CROSS}")
    made, driver = tmp_path / "program", tmp_path / "driver"
    subprocess.run([CROSS, "-std=c99", *WARNINGS, "-o", made, EXAMPLE, *flags(root)], check=True)
    subprocess.run([CROSS, "-std=c99", *WARNINGS, "-o", driver, HERE / "driver.c", *flags(root)], check=True)
    emulator = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={root}/usr/lib"]
    check_example([*emulator, str(made)], root, service, tmp_path)
    told = run([*emulator, str(driver), "load", str(service.socket), "500"], root, service)
    assert told.decode().splitlines()[-1].startswith("500 ")
