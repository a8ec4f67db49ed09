"""Measures the kernels in children: one that crashes, hangs or faults costs a kernel, and not the report."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from honed.runtime import strict

from .measuring import Measured

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "benchmarks.board.measuring")
_KERNEL_SECONDS = 30.0
_LOSSES = 5  # children that may be lost before the rest is left out


def measure(
    spec: str,
    count: int,
    seconds: float,
    *,
    command: Sequence[str] = COMMAND,
    kernel_seconds: float = _KERNEL_SECONDS,
) -> list[Measured]:
    """What came of each of `count` kernels on a device; none is begun after `seconds`.

    A child that ends or takes longer than `kernel_seconds` is lost, with the kernel it was at.
    """
    found, lost = list[Measured](), list[str]()
    end = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end and len(lost) < _LOSSES:
        with _Child([*command, spec, str(len(found))], kernel_seconds) as child:
            while len(found) < count and time.monotonic() < end:
                begun, answer = child.line(), child.line()
                if answer:
                    found.append(strict.from_plain(Measured, json.loads(answer), where="a measured kernel"))
                    continue
                lost.append(child.end())
                if begun:
                    found.append(Measured(failed=lost[-1]))
                break
    left = f"left out: {lost[-1]}" if len(lost) == _LOSSES else "no time was left for it"
    return found + [Measured(failed=left)] * (count - len(found))


class _Child:
    """A measuring process; a context manager that leaves none behind."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._seconds = seconds
        self._late = False
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, bufsize=0
        )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def line(self) -> str:
        """What it tells next; "" where it has ended or takes too long."""
        assert self._process.stdout is not None
        data, end = b"", time.monotonic() + self._seconds
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            self._late = not ready
            more = os.read(self._process.stdout.fileno(), 1) if ready else b""
            if not more:
                return ""
            data += more
        return data.decode()

    def end(self) -> str:
        """How it came to its end, which is brought about where it hangs."""
        if self._late:
            self._process.kill()
        status = self._process.wait()
        if self._late:
            return f"it took more than {self._seconds:g} s"
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with status {status}{f': {words[-1][:200]}' if words else ''}"
