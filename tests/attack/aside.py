"""Processes beside the attacks: they work on their own and tell on demand what they saw."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_ANSWER_SECONDS = 90.0


class Aside:
    """A child `python -m tests.attack.MODULE` that answers each line on its input with a line of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.attack.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.take()  # it is up

    @property
    def pid(self) -> int:
        return self._process.pid

    def take(self) -> dict[str, Any]:
        """What it saw since it was last asked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("take\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _ANSWER_SECONDS)[0]:
            raise AssertionError(f"{self._process.args!r} does not answer: the service hangs, or it does")
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"{self._process.args!r} ended with {self._process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def asked(seconds: float) -> bool:
    """Wait so long, or until the parent asks; ends this process when the parent is gone."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return False
    if not sys.stdin.readline():
        sys.exit(0)
    return True


def tell(told: dict[str, Any]) -> None:
    """Answer the parent."""
    print(json.dumps(told), flush=True)


def percentile(values: list[float], share: float) -> float:
    """Of the values that `share` of them do not exceed, the largest; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def turns(seconds: float) -> Iterator[bool]:
    """For ever, every so many seconds: whether the parent asks."""
    while True:
        yield asked(seconds)
