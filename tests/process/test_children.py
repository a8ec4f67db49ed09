"""How a child is held: its bounds, its deadline, its end with its parent, and what is said of that."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from honed.process.children import ExitInfo, ResourceLimits, output, python, running, start
from honed.runtime.errors import InvalidArgument
from tests.daemon.running import wait_for
from tests.processes import has_ended


def program(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_onnx_runtime_in_a_child_sends_nothing_to_its_makers() -> None:
    """By default the wheels of ONNX Runtime 1.31 send what they run, and keep a number of the machine."""
    said, death = output(program("import os; print(os.environ['ORT_DISABLE_TELEMETRY'])"), seconds=60)
    assert (said, death) == (b"1\n", ExitInfo(status=0))


def test_a_child_is_bounded() -> None:
    code = """
import os, resource
limits = [resource.getrlimit(kind)[0] for kind in
    (resource.RLIMIT_DATA, resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE)]
print(*limits, os.nice(0), os.getpgid(0) == os.getpid(), open("/proc/self/oom_score_adj").read().strip())
try:
    bytearray(600 << 20)
    print("allocated")
except MemoryError:
    print("refused")
"""
    bounds = ResourceLimits(memory_mib=400, address_mib=4000, cpu_seconds=60, niceness=3)
    said, death = output(program(code), bounds, seconds=60)
    assert death == ExitInfo(status=0)
    *limits, niceness, leads, score, memory = said.decode().split()
    assert limits == [str(400 << 20), str(4000 << 20), "60", "0"]
    assert (niceness, leads, memory) == (str(os.nice(0) + 3), "True", "refused")
    assert int(score) >= 530, "what is nicer goes first when memory runs out"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 400 << 20


def test_bounds_of_the_parent_stay() -> None:
    code = """
import sys, resource
from honed.process.children import ResourceLimits, output
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
inner = (sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_CPU)[0])")
print(output(inner, ResourceLimits(cpu_seconds=60), seconds=60)[0].decode())
"""
    assert output(program(code), seconds=60)[0].split() == [b"30"]


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = f"import os, time; open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = (
        "import sys, time\n"
        "from honed.process.children import start\n"
        f"start((sys.executable, '-c', {child!r}))\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    wait_for(lambda: ready.exists() and ready.read_text(), "the child to start")
    pid = int(ready.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: has_ended(pid), "the child to end")


def test_an_orphan_does_not_start() -> None:
    # As if the parent had died and init had taken over.
    launched = python("honed.process.limits", "1", "0", "0", "0", "0", *program("print('started')"))
    done = subprocess.run(launched, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (127, "")


def test_a_deadline_ends_a_child_with_those_it_started() -> None:
    said = b""
    for seconds in (0.5, 2, 8, 32, 128):  # a busy machine may not have started it in less
        said, death = output(("/bin/sh", "-c", "sleep 600 & echo $!; sleep 600"), seconds=seconds)
        assert death.late
        assert not death.killed
        assert not death.from_outside
        assert not death.out_of_memory
        assert str(death) == f"it took more than {seconds:g} s"
        if said:
            break
    wait_for(lambda: has_ended(int(said)), "what it started to end")


def test_leaving_ends_a_child() -> None:
    with running(program("import os, time; print(os.getpid(), flush=True); time.sleep(600)")) as child:
        pid = int(next(child.lines()))
    assert not Path(f"/proc/{pid}").exists()


def test_what_a_child_said_last_is_told() -> None:
    code = "import os, sys\nprint('first\\n the last \\n', file=sys.stderr, flush=True)\nos.abort()"
    said, death = output(program(code), seconds=60)
    assert said == b""
    assert str(death) == "it was ended by signal SIGABRT; it said last: the last"


@pytest.mark.parametrize(
    ("death", "text", "from_outside", "out_of_memory"),
    [
        (ExitInfo(status=0), "it ended with status 0", False, False),
        (ExitInfo(status=-11), "it was ended by signal SIGSEGV", False, False),
        (ExitInfo(status=-15), "it was ended by signal SIGTERM", True, False),
        (ExitInfo(status=-9), "it was ended by signal SIGKILL", True, True),
        (ExitInfo(status=-9, deadline=0.5), "it took more than 0.5 s", False, False),
        (ExitInfo(status=-40), "it was ended by signal 40", False, False),
        (
            ExitInfo(status=1, said="MemoryError"),
            "it ended with status 1; it said last: MemoryError",
            False,
            True,
        ),
        (ExitInfo(status=None), "it does not answer and does not end", False, False),
    ],
)
def test_how_an_end_is_told(death: ExitInfo, text: str, from_outside: bool, out_of_memory: bool) -> None:
    assert str(death) == text
    assert (death.from_outside, death.out_of_memory) == (from_outside, out_of_memory)


def test_arguments_that_no_process_can_have() -> None:
    for argument in ("a\0b", "x" * 40_000):
        with pytest.raises(InvalidArgument, match="too long or holds a zero character"):
            start(program(argument))
