"""The packages that hold no foreign code, really built: twice to the same bytes, and as Debian wants."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("git", "dh", "dh_python3", "dpkg-buildpackage", "dpkg-deb", "fakeroot")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)) or not (ROOT / ".git").exists(),
        reason="needs a clone, and the Debian packages debhelper, dh-python, dpkg-dev and fakeroot",
    ),
]


def build(folder: Path, umask: int, timezone: str) -> dict[str, Path]:
    """The packages for all machines, made from the files git knows; by package."""
    tree = folder / "honed"
    tree.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0")[:-1]:
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    done = subprocess.run(
        ["dpkg-buildpackage", "--no-sign", "--build=all", "--no-check-builddeps"],
        cwd=tree,
        env=os.environ | {"TZ": timezone},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        umask=umask,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return {path.name.partition("_")[0]: path for path in folder.glob("*.deb")}


def listing(deb: Path) -> dict[str, str]:
    """Mode and owner by path."""
    told = subprocess.run(["dpkg-deb", "--contents", deb], capture_output=True, text=True, check=True).stdout
    rows = (line.split(maxsplit=5) for line in told.splitlines())
    return {row[5].partition(" -> ")[0]: f"{row[0]} {row[1]}" for row in rows}


def test_the_packages(tmp_path: Path) -> None:
    """One test, since building takes its time."""
    built = build(tmp_path / "one", 0o022, "UTC")
    bridges = {"honed-farm", "honed-frigate", "honed-http", "honed-hub"}
    packages = {"honed", "honed-doc", "python3-honed", *bridges}
    assert set(built) == packages

    again = build(tmp_path / "two" / "deeper", 0o077, "Pacific/Chatham")
    for name, deb in built.items():
        assert digest(deb) == digest(again[name]), f"{name} is not the same when it is built again"

    files = {name: listing(deb) for name, deb in built.items()}
    for each in files.values():
        assert {owner for *_, owner in (row.split() for row in each.values())} == {"root/root"}
        assert not [path for path, row in each.items() if row[0] != "l" and "w" in row[4:10]]
    for path in ("./usr/bin/hone", "./usr/sbin/honed", "./lib/systemd/system/honed.socket", "./etc/honed/"):
        assert path in files["honed"]
    site = "./usr/share/doc/honed-doc/html"
    assert {f"{site}/docs/guide.html", f"{site}/docs/api/c.html", f"{site}/searchindex.js"} <= set(
        files["honed-doc"]
    )
    assert not [path for path in files["honed-doc"] if path.startswith(site) and path.endswith(".gz")]
    module = "./usr/lib/python3/dist-packages/honed"
    assert f"{module}/runtime/client.py" in files["python3-honed"]
    assert not [path for path in files["python3-honed"] if path.startswith((f"{module}/d", f"{module}/t"))]
    assert not [path for path in files["honed"] if path.startswith((f"{module}/runtime", f"{module}/tuner"))]
    assert f"{module}/__init__.py" not in {path for each in files.values() for path in each}
    for name in ("frigate", "http"):
        own = files[f"honed-{name}"]
        assert {
            f"{module}/{name}/main.py",
            f"./usr/sbin/honed-{name}",
            f"./etc/honed/honed-{name}.toml",
        } <= set(own)

    scripts = tmp_path / "scripts"
    subprocess.run(["dpkg-deb", "--control", built["honed"], scripts], check=True)
    started = re.findall(r"deb-systemd-invoke (.*) >", (scripts / "postinst").read_text())
    assert started == ["start 'honed.socket'", "$_dh_action 'honed.service'"], "an upgrade closes the socket"

    subprocess.run(["dpkg-deb", "--control", built["honed-http"], tmp_path / "http"], check=True)
    done = (tmp_path / "http" / "postinst").read_text()
    assert "was-enabled defaults to true" not in done, "HTTP is off until it is enabled"

    subprocess.run(["dpkg-deb", "--control", built["honed-farm"], tmp_path / "farm"], check=True)
    done = (tmp_path / "farm" / "postinst").read_text()
    assert "was-enabled defaults to true" not in done, "a machine is in no farm until it is put there"
    assert "./etc/default/honed-farm" in files["honed-farm"]

    if shutil.which("lintian"):
        command = ["lintian", "--allow-root", "--fail-on", "error,warning", "--tag-display-limit", "0"]
        told = subprocess.run([*command, *built.values()], capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout + told.stderr


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
