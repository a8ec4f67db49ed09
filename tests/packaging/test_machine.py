"""The emulated machine's driver (packaging/machine), with its real agent and a qemu that emulates nothing."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.daemon.running import wait_for

MACHINE = Path(__file__).resolve().parents[2] / "packaging/machine"
# Relays between the socket that qemu would make and an agent, whose device is a terminal, and starts
# that anew as its unit would. Their process ids are in files beside the socket.
QEMU = f"""import os, pathlib, pty, select, socket, subprocess, sys, tty

(option,) = (each for each in sys.argv if each.startswith("socket,"))
path = pathlib.Path(option.split("path=")[1].split(",")[0])
(path.parent / "qemu").write_text(str(os.getpid()))
server = socket.socket(socket.AF_UNIX)
server.bind(str(path))
server.listen()
port, _ = server.accept()
ours, theirs = pty.openpty()
tty.setraw(theirs)
agent = None
while True:
    if agent is None or agent.poll() is not None:
        agent = subprocess.Popen(["sh", "{MACHINE}/agent", os.ttyname(theirs)], start_new_session=True)
        (path.parent / "agent").write_text(str(agent.pid))
    for ready in select.select([port, ours], [], [], 0.05)[0]:
        if ready is ours:
            port.sendall(os.read(ours, 4096))
        elif not (said := port.recv(4096)):
            sys.exit()
        else:
            os.write(ours, said)
"""
OWNER = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from machine import Machine

machine = Machine(Path(sys.argv[2]), kernel=Path("k"), initrd=Path("i"), cores=1, memory_mib=1)
machine.boot(60)
print("up", flush=True)
machine.run("sleep 600", 600)
"""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(MACHINE))
    return importlib.import_module


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a machine, with that qemu first in PATH."""
    program = tmp_path / "qemu.py"
    program.write_text(QEMU)
    for name, text in (
        ("qemu-system-aarch64", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {program} "$@"\n'),
        ("systemctl", f"#!/bin/sh\nkill $(cat {tmp_path}/qemu)\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def machine(run: Path, modules: Callable[[str], ModuleType]) -> Iterator[Any]:
    made = modules("machine").Machine(run, kernel=Path("k"), initrd=Path("i"), cores=1, memory_mib=1)
    made.boot(60)
    yield made
    made.kill()


def test_commands_say_what_they_say(machine: Any, modules: Callable[[str], ModuleType]) -> None:
    assert machine.run("echo one; echo two >&2", 60) == "one\ntwo\n"
    assert machine.run("printf 'no end of line'", 60) == "no end of line"
    assert machine.run("printf 'machine-test: '", 60) == "machine-test: "
    assert machine.run("cat", 60) == ""
    heard: list[str] = []
    with pytest.raises(modules("machine").CommandError, match="exit status 3 of: echo told; exit 3") as error:
        machine.run("echo told; exit 3", 60, heard.append)
    assert error.value.said == "".join(heard) == "told\n"
    assert machine.run("  echo 'two  spaces, \\$HOME'", 60) == "two  spaces, \\$HOME\n"


def test_an_agent_that_was_started_anew(
    machine: Any, run: Path, modules: Callable[[str], ModuleType]
) -> None:
    first = (run / "agent").read_text()
    with pytest.raises(modules("machine").MachineError, match="agent was started anew during: kill"):
        machine.run("kill -KILL $PPID; sleep 600", 60)
    assert machine.run("echo again", 60) == "again\n"
    assert (run / "agent").read_text() != first


def test_what_a_test_left_running_is_not_the_next_ones(machine: Any) -> None:
    machine.run("(sleep 0.3; echo late) &", 60)
    wait_for(lambda: select.select([machine._port], [], [], 0)[0], "what was left running to say something")
    assert machine.run("echo mine", 60) == "mine\n"


def test_it_is_switched_off_and_on(machine: Any) -> None:
    machine.power_off(60)
    machine.boot(60)
    assert machine.run("echo on", 60) == "on\n"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_qemu_does_not_outlive_its_owner(run: Path, how: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, MACHINE, run], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    qemu = psutil.Process(int((run / "qemu").read_text()))
    owner.send_signal(how)
    owner.wait(60)
    owner.stdout.close()
    qemu.wait(60)


class Stub:
    """A machine in which every test but `compiled` passes."""

    def __init__(self, error: type[Exception]) -> None:
        self.ran: list[str] = []
        self._error = error

    def run(self, command: str, _seconds: float, _hear: object) -> str:
        self.ran.append(command.rpartition("-")[2])
        if command.endswith("compiled"):
            raise self._error(command, 1, "RESULT half, s: 2.5\n", True)
        return "RESULT whole, s: 1.5\r\n"


def test_a_test_that_fails_keeps_no_other_from_running(
    modules: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = modules("run")
    monkeypatch.setattr(runner, "compile_here", lambda *_: None)
    stub = Stub(modules("machine").CommandError)
    assert runner.run_tests(stub, runner.with_needs(["faults"]), [], argparse.Namespace(run=None)) == [
        "compiled"
    ]
    assert stub.ran == ["install", "compiled", "faults"]
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "   " in line]
    assert rows == [
        ["whole,", "s", "1.5"],
        ["half,", "s", "2.5"],
        ["install", "passed"],
        ["compiled", "failed"],
        ["faults", "passed"],
    ]


def test_what_a_test_builds_on_runs_before_it(modules: Callable[[str], ModuleType]) -> None:
    runner = modules("run")
    assert runner.with_needs(["limits"]) == ["install", "compiled", "compiler", "limits"]
    assert runner.with_needs(["board"]) == ["install", "board"]
    assert runner.with_needs([]) == ["install", "compiled", "faults", "boot", "compiler", "limits", "board"]
    for name in runner.with_needs([]):
        assert name == "boot" or len(list((MACHINE / "tests").glob(f"[1-9]-{name}"))) == 1
