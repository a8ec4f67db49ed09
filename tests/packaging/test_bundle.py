"""The compiler's bundle: which wheels are locked, what is unpacked of them, what their libraries need."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import onnx
import pytest

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "packaging/bundle"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BUNDLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def locked() -> dict[str, str]:
    text = (BUNDLE / "bundle.lock").read_text()
    return dict(re.findall(r"^([a-z-]+)==(\S+) \\$", text, re.MULTILINE))


def test_the_lock_has_the_compiler_that_was_tested() -> None:
    tested = dict(re.findall(r"^([a-z-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    for name in ("apache-tvm", "apache-tvm-ffi", "onnx"):
        assert locked()[name] == tested[name]


def test_every_bundled_project_is_in_the_copyright_file() -> None:
    text = (ROOT / "debian/copyright").read_text()
    patterns = " ".join(re.findall(r"^Files: (.*(?:\n .*)*)$", text, re.MULTILINE)).split()
    for name in locked():
        held = f"bundled/{name.replace('-', '_')}-1.dist-info/METADATA"
        assert any(fnmatch.fnmatchcase(held, pattern) for pattern in patterns if pattern != "*"), name


def test_what_is_not_used_is_left_out(tmp_path: Path) -> None:
    files = {
        "xgboost/core.py": "core",
        "xgboost/spark/core.py": "unused",
        "xgboost-1.0.dist-info/METADATA": "Version: 1.0",
        "xgboost-1.0.dist-info/RECORD": "no longer true",
        "xgboost_cpu.libs/libgomp-1234.so.1.0.0": "a copy",
    }
    packed = wheel(tmp_path / "w", "xgboost", files)
    script("unpack").unpack(packed, tmp_path / "out")
    script("unpack").link(packed, tmp_path / "out", "x86_64-linux-gnu")
    found = {
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if not path.is_dir()
    }
    assert found == {
        "xgboost/core.py",
        "xgboost-1.0.dist-info/METADATA",
        "xgboost_cpu.libs/libgomp-1234.so.1.0.0",
    }
    library = tmp_path / "out/xgboost_cpu.libs/libgomp-1234.so.1.0.0"
    assert str(library.readlink()) == "/usr/lib/x86_64-linux-gnu/libgomp.so.1"


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil", "thing-1.0.data/data/bin/x"])
def test_a_wheel_that_writes_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="holds"):
        script("unpack").unpack(wheel(tmp_path / "w", "thing", {name: "x"}), tmp_path / "out")


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs binutils")
def test_what_libraries_need_becomes_dependencies(tmp_path: Path) -> None:
    shutil.copy(sys.executable, tmp_path / "libany.so")
    names, machine = script("needs"), platform.machine()
    with pytest.raises(ValueError, match="needs a glibc newer than"):
        names.needs(tmp_path, machine, 0)
    told = subprocess.run(
        ["readelf", "-d", sys.executable], check=True, capture_output=True, text=True
    ).stdout
    if set(re.findall(r"NEEDED.*\[(.+)\]", told)) <= set(names._PROVIDED):
        # This Python may be made for the newest.
        libc = {f"libc6 (>= 2.{minor})" for minor in range(28, 99)}
        assert len(libc & names.needs(tmp_path, machine, 99)) == 1
    other = "aarch64" if machine == "x86_64" else "x86_64"
    with pytest.raises(ValueError, match=f"not made for {other}"):
        names.needs(tmp_path, other, 99)
    names._PROVIDED.pop("libc.so.6")
    with pytest.raises(ValueError, match="neither Debian nor the bundle"):
        names.needs(tmp_path, machine, 99)


def test_each_wheel_goes_into_one_package() -> None:
    """The CPU engine's package has what it imports; the compiler's has the rest, and depends on it."""
    names = re.findall(r"^([a-z-]+)==", (ROOT / "packaging/bundle/bundle.lock").read_text(), re.M)
    packages = {
        name: script("unpack").package_of(Path(f"{name.replace('-', '_')}-1-x.whl")) for name in names
    }
    assert {name for name, package in packages.items() if package == "honed-tuner"} == {
        "apache-tvm",
        "apache-tvm-ffi",
        "xgboost-cpu",
    }


PACKAGES = Path(onnx.__file__).parents[1]


def recorded() -> dict[str, list[str]]:
    """The files of each bundled project that is installed here, as its wheel has them."""
    names = {name.replace("-", "_") for name in locked()}
    lists = [path for path in PACKAGES.glob("*.dist-info/RECORD") if path.parent.name.split("-")[0] in names]
    files = {path.parent.name.split("-")[0]: path.read_text().splitlines() for path in lists}
    return {
        name: [
            file
            for line in lines
            if "__pycache__" not in (file := line.rpartition(",")[0].rpartition(",")[0])
        ]
        for name, lines in files.items()
    }


def staged(folder: Path) -> dict[str, int]:
    """What `unpack` would leave of them in a folder, and the MiB of each package."""
    bundle, sizes = script("unpack"), dict.fromkeys(("honed-cpu", "honed-tuner"), 0)
    for name, files in recorded().items():
        for file in files:
            if file.startswith("..") or any(fnmatch.fnmatchcase(file, each) for each in bundle._UNUSED):
                continue
            place = folder / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PACKAGES / file, place)
            sizes[bundle.package_of(Path(f"{name}-1-x.whl"))] += place.stat().st_size
    return {name: size >> 20 for name, size in sizes.items()}


def test_every_pattern_leaves_something_out() -> None:
    files = [file for each in recorded().values() for file in each]
    for pattern in script("unpack")._UNUSED:
        if pattern.partition("/")[0] in ("tvm", "tvm_ffi", "xgboost", "onnx"):  # as in the lock
            assert any(fnmatch.fnmatchcase(file, pattern) for file in files), pattern


@pytest.mark.slow
@pytest.mark.tvm
@pytest.mark.opencl
def test_a_model_is_compiled_and_tuned_with_what_is_left(tmp_path: Path) -> None:
    """And it is as little as can be: TVM's one library alone has 247 MiB for x86-64, and 229 for arm64."""
    folder = tmp_path / "bundled"
    sizes = staged(folder)
    print(sizes)
    assert sizes["honed-cpu"] <= 110  # of 120, which the service has a part in
    library = (folder / "tvm/lib/libtvm_compiler.so").stat().st_size >> 20
    assert sizes["honed-tuner"] - library <= 36
    model = ROOT / "tests/models/mobilenet_v2_035_128.onnx"
    places = ["--records", tmp_path / "records.sqlite", "--cache-dir", tmp_path / "cache"]
    found = "import tvm, onnx, onnxruntime, xgboost; print(tvm.__file__, onnx.__file__, xgboost.__file__)"
    environ = os.environ | {"PYTHONPATH": str(folder)}
    for command in (
        ["-c", found],
        ["-m", "honed.tuner", "compile", "-o", tmp_path / "made.honed", model],
        ["-m", "honed.tuner", "tune", *places, "--trials", "4", "-o", tmp_path / "tuned.honed", model],
    ):
        ran = subprocess.run(
            [sys.executable, *command], env=environ, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        if command[0] == "-c":
            assert ran.stdout.count(str(folder)) == 3
