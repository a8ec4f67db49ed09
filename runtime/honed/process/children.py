"""Child processes: what they may take, how long they may take it, and what ended them; and jobs.

A job is a child that ends: arguments in, JSON lines out. `aio` has what an event loop starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import IO

from honed.protocol.errors import InvalidArgument
from honed.protocol.strict import Map

from .crashes import CrashHeard, telling
from .limits import out_of_memory

_MAX_ARGUMENT = 32_000  # Letters, of four bytes at most; Linux allows 128 KiB for one
_TAIL = 8192  # Bytes of what a child wrote that are looked at
_MAX_SAID = 300  # Letters
_LINE = 4 << 20  # Bytes
# What ends a process that somebody else ends, or that memory runs out for.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# A parent that used vfork stands still, all of its threads with it, until the child got a processor.
setattr(subprocess, "_USE_VFORK", False)  # noqa: B010 - documented, and typed as if it could not be set


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """What a child may take; 0: no more than its parent may.

    memory_mib: what it writes to, as RLIMIT_DATA counts it: OpenCL drivers reserve far more address space
    than they use. address_mib: its address space. cpu_seconds: processor time of all its threads.
    """

    memory_mib: int = 0
    address_mib: int = 0
    cpu_seconds: int = 0
    niceness: int = 0


FREE = ResourceLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitInfo:
    """How a child ended. As text, a clause about it: "it was ended by signal SIGSEGV".

    `status` is as `subprocess` gives it, None where the child hangs in a driver and cannot be ended;
    `deadline` is the seconds it was allowed where it was killed for taking more, `said` its last line, and
    `inside` the function that it was in when it crashed, as far as it told.
    """

    status: int | None
    deadline: float | None = None
    said: str = ""
    inside: str = ""

    @property
    def signal(self) -> signal.Signals | None:
        """What ended it, if it was a signal that has a name."""
        with suppress(ValueError):
            return signal.Signals(-(self.status or 0))
        return None

    @property
    def late(self) -> bool:
        """Whether it was killed because it took too long."""
        return self.deadline is not None

    @property
    def from_outside(self) -> bool:
        """Whether somebody else ended it, or the kernel because memory ran out."""
        return not self.late and self.signal in _FROM_OUTSIDE

    @property
    def killed(self) -> bool:
        """Whether somebody else, or the kernel, ended it by SIGKILL."""
        return not self.late and self.signal is signal.SIGKILL

    @property
    def out_of_memory(self) -> bool:
        """Whether memory was the reason, as far as can be told."""
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
    """Start a program as a bounded child, which ends with the thread that calls this.

    It gets a process group of its own, which a Ctrl-C meant for the parent does not reach. Raises OSError,
    and InvalidArgument where an argument, which may be a client's, is none that a process can have.
    """
    for argument in program:
        if "\0" in argument or len(argument) > _MAX_ARGUMENT:
            raise InvalidArgument(
                f"{argument[:80]!r} is too long or holds a zero character; use another name"
            )
    limits = (bounds.memory_mib, bounds.address_mib, bounds.cpu_seconds, bounds.niceness)
    return subprocess.Popen(
        [*python("honed.process.launch", str(os.getpid()), *map(str, limits)), *program],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        env=None if environment is None else dict(environment),
        process_group=0,
    )


def kill_group(pid: int) -> None:
    """Kill a child that was started, and those it started; that they are gone already is fine."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def last_line(log: IO[bytes]) -> str:
    """Return the last line that is not blank of a file that a child wrote to; "" where there is none."""
    log.seek(max(log.seek(0, os.SEEK_END) - _TAIL, 0))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:_MAX_SAID] if lines else ""


class RunningChild:
    """A child that was started, with its standard output to be read."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        assert process.stdout is not None
        self.stdout: IO[bytes] = process.stdout
        self._process = process
        self._log = log
        self._deadline: float | None = None

    def lines(self) -> Iterator[bytes]:
        """Return an iterator over the lines of bytes that the child writes.

        Lines longer than _LINE bytes come in pieces.
        """
        return iter(partial(self.stdout.readline, _LINE), b"")

    def interrupt(self) -> None:
        """Ask the process to end, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def death(self) -> ExitInfo:
        """Return how the process ended, once it has ended."""
        status = self._process.wait()
        return ExitInfo(status=status, deadline=self._deadline, said=last_line(self._log))

    def kill(self, deadline: float | None = None) -> None:
        """End it and those it started, with `deadline` for having taken longer."""
        if self._process.poll() is None:
            self._deadline = deadline
            kill_group(self._process.pid)


@contextmanager
def started(
    program: Sequence[str],
    bounds: ResourceLimits = FREE,
    *,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningChild]:
    """Start a program, which is killed when the block ends, and after `seconds`."""
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
    """Run a program for `seconds` at most: what it wrote to standard output, and how it ended."""
    with started(program, bounds, seconds=seconds, environment=environment) as child:
        return child.stdout.read(), child.death()


# ---- Jobs ----

Say = Callable[[Mapping[str, object]], None]


@contextmanager
def answering() -> Iterator[Say]:
    """Yield the function by which a job writes a map on the standard output that it was started with.

    Everything else that prints there, as drivers and libraries do, goes to standard error from now on.
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
    """Run a job for `seconds` at most; return the maps that it wrote, without other lines, and its end."""
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
    """A job ended without a last word, or badly after it; the text is a clause about it."""

    def __init__(self, death: ExitInfo) -> None:
        super().__init__(str(death))
        self.death = death
