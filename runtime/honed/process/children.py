"""Starts child processes with limits and deadlines, says what ended them, and runs jobs.

A job is a child that ends: arguments in, JSON lines out. If it crashes, Python's faulthandler reports the
function. `aio` starts children in an event loop.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Final

from honed.protocol.errors import InvalidArgument
from honed.protocol.strict import Map

from .limits import out_of_memory

_MAX_ARGUMENT = 32_000  # Characters, of four bytes at most; Linux allows 128 KiB for one argument
_TAIL = 8192  # Bytes at the end of a child's output that are searched for its last line
_MAX_SAID = 300  # Characters of that line
_LINE = 4 << 20  # Bytes
_CRASH: Final = b"Fatal Python error: "  # How faulthandler's report of a crash begins
_FRAME: Final = re.compile(r'  File "(.*)", line \d+ in (\S+)')
_LIBRARY: Final = re.compile(r".*/(?:site|dist)-packages/(\w+)")
_CALLED: Final = {"onnx": "ONNX", "onnxruntime": "ONNX Runtime", "tvm": "TVM", "tvm_ffi": "TVM"}
_answers: list[IO[str]] = []  # Streams to which this process reports its crash
# Signals with which somebody else, or the kernel if memory runs out, ends a process.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# Using vfork, all threads of the parent would stop until the child gets a processor.
setattr(subprocess, "_USE_VFORK", False)  # noqa: B010 - documented, and typed as if it could not be set


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """The limits of a child; 0: no more than its parent's.

    memory_mib: writable memory, as RLIMIT_DATA counts it: OpenCL drivers reserve far more address space than
    they use. address_mib: its address space. cpu_seconds: processor time of all its threads.
    """

    memory_mib: int = 0
    address_mib: int = 0
    cpu_seconds: int = 0
    niceness: int = 0


FREE = ResourceLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitInfo:
    """The end of a child. As text, a clause about it: "it was ended by signal SIGSEGV".

    `status` is as in `subprocess`, None if the child hangs in a driver and cannot be ended; `deadline` is the
    seconds it was allowed if it was killed for exceeding them, `said` its last line, and `inside` the
    function in which it crashed, if it reported one.
    """

    status: int | None
    deadline: float | None = None
    said: str = ""
    inside: str = ""

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended it, None without one that has a name."""
        with suppress(ValueError):
            return signal.Signals(-(self.status or 0))
        return None

    @property
    def late(self) -> bool:
        """Return whether it was killed because it took too long."""
        return self.deadline is not None

    @property
    def from_outside(self) -> bool:
        """Return whether somebody else ended it, or the kernel because memory ran out."""
        return not self.late and self.signal in _FROM_OUTSIDE

    @property
    def killed(self) -> bool:
        """Return whether somebody else, or the kernel, ended it by SIGKILL."""
        return not self.late and self.signal is signal.SIGKILL

    @property
    def out_of_memory(self) -> bool:
        """Return whether it probably ended because memory ran out."""
        return self.killed or (not self.late and out_of_memory(self.said))

    def __str__(self) -> str:
        return f"{self._how}; it said last: {self.said}" if self.said else self._how

    @property
    def _how(self) -> str:
        if self.deadline is not None:
            return f"it took more than {self.deadline:.3g} s"
        if self.status is None:
            return "it does not answer and does not end"
        if self.status < 0:
            where = f" in {self.inside}" if self.inside else ""
            return f"it was ended by signal {self.signal.name if self.signal else -self.status}{where}"
        return f"it ended with status {self.status}"


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of honed in Python.

    Python imports nothing from the current folder, which may be anybody's.
    """
    return sys.executable, "-P", "-m", module, *arguments


def start(
    program: Sequence[str],
    bounds: ResourceLimits = FREE,
    *,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program as a child with limits, which ends with the calling thread.

    It gets a process group of its own, which a Ctrl-C meant for the parent does not reach. Raises OSError,
    and InvalidArgument if an argument, which may be a client's, is impossible for a process.
    """
    for argument in program:
        if "\0" in argument or len(argument) > _MAX_ARGUMENT:
            raise InvalidArgument(
                f"{argument[:80]!r} is too long or holds a zero character; use another name"
            )
    limits = (bounds.memory_mib, bounds.address_mib, bounds.cpu_seconds, bounds.niceness)
    return subprocess.Popen(
        [*python("honed.process.limits", str(os.getpid()), *map(str, limits)), *program],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        env=None if environment is None else dict(environment),
        process_group=0,
    )


def kill_group(pid: int) -> None:
    """Kill a child and the processes that it started; ignore those that are gone."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def last_line(log: IO[bytes]) -> str:
    """Return the last line that is not blank in a child's output file; "" if there is none."""
    log.seek(max(log.seek(0, os.SEEK_END) - _TAIL, 0))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:_MAX_SAID] if lines else ""


class RunningChild:
    """A started child, whose standard output the caller reads."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        assert process.stdout is not None
        self.stdout: IO[bytes] = process.stdout
        self._process = process
        self._log = log
        self._deadline: float | None = None

    def lines(self) -> Iterator[bytes]:
        """Return an iterator over the lines, as bytes, that the child writes.

        Lines longer than _LINE bytes are split.
        """
        return iter(partial(self.stdout.readline, _LINE), b"")

    def interrupt(self) -> None:
        """Interrupt the process as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def death(self) -> ExitInfo:
        """Return how the process ended, once it has ended."""
        status = self._process.wait()
        return ExitInfo(status=status, deadline=self._deadline, said=last_line(self._log))

    def kill(self, deadline: float | None = None) -> None:
        """Kill the process and those it started; `deadline` is the time that it exceeded, if any."""
        if self._process.poll() is None:
            self._deadline = deadline
            kill_group(self._process.pid)


@contextmanager
def running(
    program: Sequence[str],
    bounds: ResourceLimits = FREE,
    *,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningChild]:
    """Start a program, which is killed when the block ends, or after `seconds`."""
    with tempfile.TemporaryFile() as log:
        process = start(program, bounds, stdout=subprocess.PIPE, stderr=log, environment=environment)
        child = RunningChild(process, log)
        timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, child.kill, [seconds])
        timer.daemon = True
        timer.start()
        try:
            yield child
        finally:
            timer.cancel()
            child.kill()
            process.wait()
            child.stdout.close()


def output(
    program: Sequence[str],
    bounds: ResourceLimits = FREE,
    *,
    seconds: float | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[bytes, ExitInfo]:
    """Run a program for at most `seconds`; return what it wrote to standard output, and how it ended."""
    with running(program, bounds, seconds=seconds, environment=environment) as child:
        return child.stdout.read(), child.death()


# ---- Jobs ----

Say = Callable[[Mapping[str, object]], None]


@contextmanager
def answering() -> Iterator[Say]:
    """Yield the function with which a job writes a map to its original standard output.

    Everything else printed there, by drivers and libraries, goes to standard error from now on.
    """
    with os.fdopen(os.dup(1), "w") as answers, telling(answers):
        os.dup2(2, 1)
        yield lambda answer: print(json.dumps(answer), file=answers, flush=True)


def run(
    program: Sequence[str],
    bounds: ResourceLimits = FREE,
    *,
    seconds: float | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[list[Map], ExitInfo]:
    """Run a job for at most `seconds`; return the maps that it wrote, without other lines, and its end."""
    said, death = output(program, bounds, seconds=seconds, environment=environment)
    answers, crash = [], CrashHeard()
    for line in said.splitlines():
        if crash.hears(line):
            continue
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict):
            answers.append(answer)
    return answers, replace(death, inside=crash.inside)


class JobCrashed(Exception):
    """Raised when a job ended without a last event, or badly after it; the text is a clause about it."""

    def __init__(self, death: ExitInfo) -> None:
        super().__init__(str(death))
        self.death = death


@contextmanager
def telling(answers: IO[str]) -> Iterator[None]:
    """Report a crash of this process to its stream of answers during the block."""
    _answers.append(answers)
    tell_again()
    try:
        yield
    finally:
        faulthandler.disable()
        _answers.remove(answers)


def tell_again() -> None:
    """Enable the report again after a library was loaded that handles signals itself, as TVM does."""
    if _answers:
        faulthandler.disable()
        faulthandler.enable(_answers[-1], all_threads=False)


class CrashHeard:
    """A parser of crash reports in a job's lines; `inside` says where, as in "infer_shapes of ONNX"."""

    def __init__(self) -> None:
        self.inside = ""
        self._begun = self._framed = False

    def hears(self, line: bytes) -> bool:
        """Return whether a line belongs to a crash report, which is the last output of a job."""
        self._begun = self._begun or line.startswith(_CRASH)
        if self._begun and not self._framed and (frame := _FRAME.match(line.decode(errors="replace"))):
            self._framed = True
            if library := _LIBRARY.match(frame[1]):  # Libraries without a Python wrapper do not match
                self.inside = f"{frame[2]} of {_CALLED.get(library[1], library[1])}"
        return self._begun
