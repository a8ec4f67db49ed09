"""What the compiling child says, and how a child is held."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.compiler import Done, Stage, parse
from honed.daemon.launch import command
from honed.runtime.errors import HonedError, InvalidArgument, ModelRefused
from honed.runtime.protocol import MissingFiles


def line(**event: object) -> bytes:
    return json.dumps(event).encode() + b"\n"


def test_stages() -> None:
    report = parse(line(event="stage", stage="lower", fraction=0.5, text="dense"))
    assert report == Stage(stage="lower", fraction=0.5, text="dense")
    assert parse(line(event="stage", stage="x", fraction=7)) == Stage(stage="x", fraction=1.0, text="")
    assert isinstance(parse(line(event="done", output="x")), Done)


def test_refusals_and_errors() -> None:
    refused = parse(line(event="refused", message="no", reasons=["a", "b"]))
    assert type(refused) is ModelRefused
    assert (str(refused), refused.reasons) == ("no", ("a", "b"))
    missing = parse(line(event="refused", message="no", reasons=[], external_data=["w.bin"]))
    assert isinstance(missing, MissingFiles)
    assert missing.files == ("w.bin",)
    error = parse(line(event="error", code="INVALID_ARGUMENT", message="bad shape"))
    assert type(error) is InvalidArgument
    assert isinstance(parse(line(event="error")), HonedError)


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text() | st.floats(), st.lists).map(lambda v: line(event=v))
)
def test_other_output_is_no_report(data: bytes) -> None:
    assert parse(data) is None or isinstance(parse(data), Stage | Done | HonedError)


def test_a_launched_child_is_limited(tmp_path: Path) -> None:
    code = """
import os, resource
print(resource.getrlimit(resource.RLIMIT_DATA)[0], os.nice(0), os.getpgid(0) == os.getpid())
try:
    bytearray(600 << 20)
    print("allocated")
except MemoryError:
    print("refused")
"""
    launched = command([sys.executable, "-c", code], memory_mib=400, niceness=3)
    done = subprocess.run(launched, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(400 << 20), str(os.nice(0) + 3), "True", "refused"]
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 400 << 20


def test_a_launched_child_dies_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = f"import os, time; open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        "from honed.daemon.launch import command\n"
        f"subprocess.Popen(command([sys.executable, '-c', {child!r}]))\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    end = time.monotonic() + 30
    while not (ready.exists() and ready.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    pid = int(ready.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_orphan_does_not_start() -> None:
    launched = command([sys.executable, "-c", "print('started')"])
    launched[3] = "1"  # as if the parent had died and init had taken over
    done = subprocess.run(launched, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (127, "")


@pytest.mark.parametrize("arguments", [["--nonsense"], ["extra"]])
def test_wrong_usage_of_the_daemon(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "honed.daemon.service", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "usage: honed" in done.stderr
