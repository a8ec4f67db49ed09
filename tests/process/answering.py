"""A child that answers typed calls, and the calls."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from honed.process.rpc import Call, RpcServer, by_name, connect
from honed.protocol.errors import HonedError, NotFound

PROGRAM = (sys.executable, "-m", "tests.process.answering")


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Call[int]):
    """Add up what was told, and this."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Call[str | None]):
    """Read from the file that comes along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(Call[None]):
    """Raise NotFound, or something else."""

    asked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(Call[None]):
    """Announce phases that may take so many seconds, and hang in the last."""

    phases: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Call[None]):
    """Announce a phase, and be done."""


class Answering(RpcServer):
    """Knows what it was told."""

    _sum = 0

    def _add(self, call: Add) -> int:
        self._sum += call.number
        return self._sum

    def _read(self, _: Read) -> str | None:
        return os.read(self.descriptors[0], 99).decode() if self.descriptors else None

    def _fail(self, call: Fail) -> None:
        if call.asked:
            raise NotFound("there is none")
        raise ArithmeticError("not foreseen")

    def _hang(self, call: Hang) -> None:
        for seconds in call.phases:
            self.progress(phase=f"may take {seconds:g} s", seconds=seconds)
        time.sleep(600)

    def _tick(self, _: Tick) -> None:
        self.progress(phase="it ticks", seconds=1.0)

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Nothing is answered but what is raised on purpose."""
        print("a driver speaks", flush=True)
        return super().error_of(raised, method)

    METHODS = by_name({Add: _add, Read: _read, Fail: _fail, Hang: _hang, Tick: _tick})


if __name__ == "__main__":
    Answering(connect()).serve()
