"""`hone` in a tree laid out as the Debian packages do it, with and without the package of an extension."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from honed.tool.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
CORE = ("python3-honed", "honed")
# The distributions that debian/rules makes of a package.
NAMES = {"python3-honed": "honed", "honed": "honed-report"}
EXTENSIONS = {row.name: row.package for row in COMMANDS if row.package}


def install(tree: Path, packages: tuple[str, ...]) -> None:
    """Lay the modules and the metadata of packages out as debian/*.install and debian/rules do."""
    for package in packages:
        for line in (ROOT / f"debian/{package}.install").read_text().splitlines():
            source, target = line.split()
            if target.startswith("usr/lib/python3/dist-packages"):
                folder = tree / target.removeprefix("usr/lib/python3/dist-packages").lstrip("/")
                folder.mkdir(parents=True, exist_ok=True)
                (folder / Path(source).name).symlink_to(ROOT / source)
        command = [ROOT / "packaging/bin/dist-info", NAMES.get(package, package), "0.1.0", tree]
        subprocess.run(command, check=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What honed depends on, and no honed."""
    made = tmp_path / "dist-packages"
    made.mkdir()
    for folder in map(Path, site.getsitepackages()):
        for each in folder.iterdir() if folder.is_dir() else ():
            if "honed" not in each.name:
                (made / each.name).symlink_to(each)
    return made


def hone(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-P", "-m", "honed.tool.main", *arguments],
        env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "80", "HONED_SOCKET": "/nonexistent"},
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_its_package_a_command_says_which_to_install(tree: Path) -> None:
    install(tree, CORE)
    for name, package in EXTENSIONS.items():
        if package in CORE:
            continue
        sentence = f"hone {name} is in the package {package}: apt install {package}"
        for more in ((), ("--help",), ("--folder", "x")) if name == "hub" else ((),):
            done = hone(tree, name, *more)
            assert (done.returncode, done.stdout, done.stderr) == (1, "", f"hone: {sentence}\n")
        assert json.loads(hone(tree, "--json", name).stdout)["error"]["message"] == sentence
    told = hone(tree, "--help").stdout
    assert "\n    report " in told
    assert "\n    hub " not in told
    assert "\n    farm " not in told
    done = hone(tree, "show", "hub")  # a model may be called so
    assert "no service answers" in done.stderr


def test_with_its_package_a_command_works(tree: Path, tmp_path: Path) -> None:
    install(tree, (*CORE, "honed-farm", "honed-hub"))
    told = hone(tree, "--help").stdout
    for name in EXTENSIONS:
        assert f"\n    {name} " in told
        assert f"hone {name}" in hone(tree, name, "--help").stdout
    done = hone(tree, "hub", "key", "--folder", str(tmp_path / "key"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["key_id"]


def test_commands_of_the_core_read_no_entry_points(tree: Path) -> None:
    install(tree, CORE)
    code = (
        "import sys; from honed.tool.main import main; main(['list']); "
        "print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": str(tree), "HONED_SOCKET": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
