"""Runs the compiling child, `python -m honed.tuner`, and reads its events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from honed.daemon import installed
from honed.daemon.launch import command
from honed.daemon.limits import Limits
from honed.runtime.errors import DeadlineExceeded, HonedError, ModelRefused, NotFound, ResourceExhausted
from honed.runtime.protocol import error_from_map

from .progress import Reporter

_MAX_EVENT_BYTES = 1 << 20
_NEWS = frozenset({"stage", "note", "tasks", "round", "trial"})  # events that are not a child's last word
_MAX_WORDS = 300  # characters of what a dying child said last


class CompilerDied(HonedError):
    """The child ended without a last word, or said something that makes no sense."""


class Child:
    """A running `python -m honed.tuner`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: IO[bytes],
        late: threading.Event,
        seconds: float | None,
    ) -> None:
        self._process = process
        self._log = log
        self._late = late
        self._seconds = seconds
        self._last: dict[str, Any] | None = None

    def events(self) -> Iterator[dict[str, Any]]:
        """What it tells while it works, until it has said its last word."""
        assert self._process.stdout is not None
        for event in _events(self._process.stdout):
            if event["event"] in _NEWS:
                yield event
            else:
                self._last = event

    def interrupt(self) -> None:
        """Ask it to stop soon and to use what it has."""
        self._process.send_signal(signal.SIGINT)

    def result(self) -> dict[str, Any]:
        """Its last word; to be called when `events` has ended. Raises what it reports, and CompilerDied."""
        status = self._process.wait()
        if self._late.is_set():
            raise DeadlineExceeded(
                f"compiling took longer than {self._seconds:g} s; "
                "compile on a faster machine, or raise --time-limit"
            )
        return _result(self._last, status, self._log)


@contextmanager
def started(arguments: Sequence[str], limits: Limits, *, seconds: float | None = None) -> Iterator[Child]:
    """Starts `python -m honed.tuner ARGUMENTS`; it is killed at the end, and when `seconds` are over.

    Raises NotFound without the compiler.
    """
    if not installed.compiler():
        raise NotFound("the compiler is not installed; install honed-tuner (apt install honed-tuner)")
    program = [sys.executable, "-m", "honed.tuner", *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command(program, memory_mib=limits.compile_memory_mib),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        with _bounded(process, seconds) as late:
            yield Child(process, log, late, seconds)


def run(arguments: Sequence[str], title: str, limits: Limits) -> dict[str, Any]:
    """Run `python -m honed.tuner ARGUMENTS` with progress on stderr and return its last word.

    The child is killed past `limits.compile_seconds`, and whenever this call ends before it did. Raises
    ModelRefused with every reason, NotFound without the compiler, the child's own errors, and CompilerDied.
    """
    with started(arguments, limits, seconds=limits.compile_seconds) as child, Reporter(title) as reporter:
        for event in child.events():
            reporter.event(event)
        return child.result()


@contextmanager
def _bounded(child: subprocess.Popen[bytes], seconds: float | None) -> Iterator[threading.Event]:
    """Kills the child at the end, and when the time is over, which sets the event; None: it has all time."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        _kill(child)

    timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        if child.poll() is None:
            _kill(child)
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child and those it started; it leads a process group unless it is too young for that."""
    child.kill()
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it had not made its group yet, or all of it is gone


def _events(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    while data := stream.readline(_MAX_EVENT_BYTES):
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            raise CompilerDied(
                f"the compiler said something that is no event: {data[:80]!r}; compare versions"
            )
        yield event


def _result(last: dict[str, Any] | None, status: int, log: IO[bytes]) -> dict[str, Any]:
    if last is None:
        raise _died(status, log)
    if last["event"] == "refused":
        raise ModelRefused(last["message"], tuple(last["reasons"]))
    if last["event"] == "error":
        raise error_from_map(last)
    if status != 0:
        raise _died(status, log)
    return last


def _died(status: int, log: IO[bytes]) -> HonedError:
    log.seek(0)
    words = [text.strip() for text in log.read().decode(errors="replace").splitlines() if text.strip()]
    said = f"; it said last: {words[-1][:_MAX_WORDS]}" if words else ""
    if status == -signal.SIGKILL:
        return ResourceExhausted("the compiler was killed, probably because memory ran out; free some memory")
    how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return CompilerDied(f"the compiler {how}{said}")
