"""The wheel, really built: what it holds, and what it says that it needs."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from honed.tool.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
BUILT_THERE = {"systemd"}  # extras that need a compiler where they are installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def required(metadata: Message, extra: str = "") -> dict[str, Requirement]:
    """What is needed with an extra, and with those that it names."""
    found: dict[str, Requirement] = {}
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not (extra and marker.evaluate({"extra": extra})):
            continue
        if requirement.name == "honed":
            for other in requirement.extras:
                found |= required(metadata, other)
        else:
            found[requirement.name] = requirement
    return found


def test_it_holds_what_git_holds_of_the_packages_and_no_test(wheel: zipfile.ZipFile) -> None:
    command = ["git", "ls-files", "--", "daemon/honed", "extensions/honed", "runtime/honed", "tuner/honed"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = {name.partition("/")[2] for name in listed if (ROOT / name).exists()}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert known <= held
    # What is new here and not added to git yet is in it, too.
    assert {name.partition("/")[0] for name in held} == {"honed", "honed-ort.pth"}
    assert "honed/__init__.py" not in held, "honed is a namespace"
    assert not [name for name in held if Path(name).name.startswith("test_") or "/tests/" in name]
    assert not [name for name in held if name.endswith((".pyc", ".onnx", ".so"))]
    packages = "protocol machine process jobs runtime daemon cpu tuner onnxfile"
    for package in packages.split():
        assert f"honed/{package}/py.typed" in held


def test_its_programs_are_there(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    held = set(wheel.namelist())
    told = configparser.ConfigParser(delimiters="=")
    told.read_string(wheel.read(name).decode())
    programs, commands = dict(told["console_scripts"]), dict(told["honed.commands"])
    assert set(commands) == {row.name for row in COMMANDS if row.package}
    assert set(programs) == {"hone", "honed", "honed-frigate", "honed-http", "honed-hub", "honed-tuner"}
    for target in (*programs.values(), *commands.values()):
        module, _, function = target.partition(":")
        file = f"{module.replace('.', '/')}.py"
        assert file in held
        assert f"\ndef {function}(" in wheel.read(file).decode()
    for target in (*told["honed.jobs"].values(), *told["honed.instruments"].values()):
        assert f"{target.partition(':')[0].replace('.', '/')}.py" in held


def test_all_is_all_that_needs_no_compiler(metadata: Message) -> None:
    extras = set(metadata.get_all("Provides-Extra", [])) - {"dev", "all"}
    together = {name for extra in extras - BUILT_THERE for name in required(metadata, extra)}
    assert set(required(metadata, "all")) == together
    assert "systemd-python" not in together
    assert {"apache-tvm", "onnxruntime", "pyopencl", "rich", "matplotlib"} <= together
    assert set(required(metadata)) == {"numpy", "msgpack"}


def test_versions_have_bounds(metadata: Message) -> None:
    """From below everything that has versions which are too old; the compiler's are those that are tested."""
    needed = required(metadata) | required(metadata, "all")
    free = {name for name, requirement in needed.items() if not requirement.specifier}
    assert free == {"cloudpickle"}
    for name in ("apache-tvm", "apache-tvm-ffi", "onnx"):
        assert {each.operator for each in needed[name].specifier} == {"=="}
    locked = dict(
        line.split(" ")[0].split("==")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in line and not line.startswith(" ")
    )
    for name, requirement in needed.items():
        assert requirement.specifier.contains(locked[name]), f"{name} {locked[name]} is what is tested"
