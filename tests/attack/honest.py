"""The honest client: asks for inferences all the time and compares every answer bit by bit.

Every other request goes through shared memory. Run as `python -m tests.attack.honest SOCKET UID N:K,...` for
the models `honest-0`, `honest-1`, ... of those sizes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import psutil

from honed.runtime.calling.shared_memory import Region
from honed.runtime.errors import HonedError

from . import users
from .aside import percentile, tell, turns
from .material.models import Victim
from .meter import Waits

EVERY_SECONDS = 0.004
_CALL_SECONDS = 30.0


class Honest:
    """One app."""

    def __init__(self, socket: str, uid: int, victims: list[Victim]) -> None:
        self._victims = victims
        self._client = users.UserClient(socket, uid, timeout=_CALL_SECONDS)
        self._rng = np.random.default_rng(1)
        self._turn = 0
        self._waits: Waits | None = None
        self._looked = 0.0
        self._pids: tuple[int, ...] = ()
        self._forget()

    def _forget(self) -> None:
        self._raw_ms: list[float] = []
        self._ms: list[float] = []
        self._wrong = 0
        self._errors: Counter[str] = Counter()

    def take(self) -> dict[str, Any]:
        """What was seen since the last time; milliseconds, without waiting for a processor, and with."""
        told = {
            "count": len(self._ms),
            "wrong": self._wrong,
            "errors": dict(self._errors),
            "p50_ms": percentile(self._ms, 0.5),
            "p99_ms": percentile(self._ms, 0.99),
            "p99_raw_ms": percentile(self._raw_ms, 0.99),
        }
        self._forget()
        return told

    def ask(self, region: Region | None) -> None:
        """One request, compared."""
        number = self._turn % len(self._victims)
        victim = self._victims[number]
        x = self._rng.standard_normal(victim.n).astype(np.float32)
        given, outputs = x, None
        if region is not None and self._turn % 2:
            given, place = region.array("float32", (victim.n,), 0), region.array("float32", (victim.n,), 4096)
            given[:] = x
            outputs = {"y": place}
        self._turn += 1
        waits = self._of_processes()
        before, begun = waits.read(), time.monotonic()
        try:
            found = self._client.infer(f"honest-{number}", {"x": given}, outputs=outputs)["y"]
        except HonedError as error:
            self._errors[f"{error.code}: {error}"[:300]] += 1
            return
        whole = (time.monotonic() - begun) * 1e3
        self._raw_ms.append(whole)
        self._ms.append(max(0.0, whole - waits.read().since(before)))
        if found.tobytes() != victim.answer(x).tobytes():
            self._wrong += 1

    def _of_processes(self) -> Waits:
        """Of the daemon, its worker and this process; looked up anew now and then."""
        if self._waits is None or time.monotonic() - self._looked > 0.5:
            self._looked = time.monotonic()
            pids = (os.getpid(), *self._service())
            if pids != self._pids or self._waits is None:
                if self._waits is not None:
                    self._waits.close()
                self._pids, self._waits = pids, Waits(*pids)
        return self._waits

    def _service(self) -> tuple[int, ...]:
        with contextlib.suppress(OSError, psutil.Error), users.raw(self._path) as raw:
            daemon = users.peer_pid(raw.socket)
            children = psutil.Process(daemon).children()
            return (daemon, *(c.pid for c in children if "honed.daemon.worker.worker" in c.cmdline()))
        return ()

    @property
    def _path(self) -> Any:
        return self._client.socket

    def serve(self) -> None:
        """Until the parent is gone."""
        region: Region | None = None
        with contextlib.ExitStack() as held:
            for wanted in turns(EVERY_SECONDS):
                if wanted:
                    tell(self.take())
                if region is None:
                    with contextlib.suppress(HonedError):
                        region = held.enter_context(self._client.region(8192))
                self.ask(region)


def main(arguments: list[str]) -> None:
    """Ask until the parent is gone."""
    socket, uid, models = arguments
    victims = [Victim(*map(int, each.split(":"))) for each in models.split(",")]
    Honest(socket, int(uid), victims).serve()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main(sys.argv[1:])
