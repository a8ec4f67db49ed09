"""The offline compiler's servers, with one in their place that answers by what a program says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.runtime.errors import DeviceError
from honed.valhall import compiler
from honed.valhall.compiler import OfflineCompileFailed, OfflineCompiler

_SERVER = """
import pathlib, signal, sys
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print("ready", flush=True)
for line in sys.stdin:
    path = pathlib.Path(sys.argv[1]) / line.strip().lstrip("/")
    said = path.read_text().splitlines()[-1]
    if said == "wait":
        signal.pause()
    if said == "crash":
        signal.raise_signal(signal.SIGSEGV)
    if said == "end":
        sys.exit(1)
    path.with_name(path.name + ".dump").write_text(said)
    print(said, flush=True)
"""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OfflineCompiler]:
    server = tmp_path / "root/server"
    server.parent.mkdir()
    server.write_text(_SERVER)
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(compiler, "_command", lambda root: [sys.executable, str(server), str(root)])
    with OfflineCompiler(tmp_path, jobs=1) as found:
        yield found


def test_a_program_that_is_not_built_in_time_is_refused_alone(
    offline: OfflineCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offline.build("built").result().code == "built"
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_DEADLINE", 0.05)
        with pytest.raises(OfflineCompileFailed, match=r"did not end within 0\.05 seconds"):
            offline.build("wait").result()
    assert offline.build("built").result().code == "built", "by another server"


def test_what_the_compiler_refuses_is_told(offline: OfflineCompiler) -> None:
    with pytest.raises(OfflineCompileFailed, match="the compiler refused"):
        offline.build("refused").result()


def test_a_program_that_the_compiler_crashes_on_costs_a_start(offline: OfflineCompiler) -> None:
    with pytest.raises(OfflineCompileFailed, match="the compiler was ended by Segmentation fault"):
        offline.build("crash").result()
    assert offline.build("built").result().code == "built", "by another server"


def test_a_missing_compiler_is_told_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compiler.ROOTS, "26.2", tmp_path)
    with pytest.raises(DeviceError, match=f"build --mesa 26.2 {tmp_path}`"):
        OfflineCompiler(tmp_path)


def test_a_server_that_ends_is_the_devices_fault(offline: OfflineCompiler) -> None:
    with pytest.raises(DeviceError, match="ended or hangs"):
        offline.build("end").result()
