"""Processes a list in children: one that crashes, hangs or faults costs one item of the list, not the rest.

The child prints two lines for each item: its number before it begins, then its result, as JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from honed.protocol import strict

ROOT = Path(__file__).parents[1]
_LOSSES = 5  # Children that may be lost before the rest is left out


class Outcome(Protocol):
    """The result of one: `failed` says why there is nothing else to say of it."""

    def __init__(self, *, failed: str) -> None: ...


T = TypeVar("T", bound=Outcome)


def work_off(
    kind: type[T], command: Sequence[str], count: int, seconds: float, *, each_seconds: float
) -> list[T]:
    """Yield the result of each of `count`, as `kind`; begin none after `seconds`.

    `command` is run with the number to begin with as its last argument. A child that ends or takes longer
    than `each_seconds` is lost, with the item it was at.
    """
    found, lost = list[T](), list[str]()
    end = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end and len(lost) < _LOSSES:
        with _Child([*command, str(len(found))], each_seconds) as child:
            while len(found) < count and time.monotonic() < end:
                begun = child.line()
                answer = begun and child.line()
                if answer:
                    found.append(strict.from_plain(kind, json.loads(answer), where="a child's answer"))
                    continue
                lost.append(child.end())
                if begun:
                    found.append(kind(failed=lost[-1]))
                break
    left = f"left out: {lost[-1]}" if len(lost) == _LOSSES else "no time was left for it"
    return found + [kind(failed=left)] * (count - len(found))


class _Child:
    """A working process, and a context manager that ends it."""

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
        """Return the child's next line; "" if it has ended or takes too long."""
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
        """Return how the child ended, after killing it if it hangs."""
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
