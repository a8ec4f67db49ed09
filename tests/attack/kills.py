"""kill -9 of every kind of process at any moment, while models come and go: what was acknowledged is so."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from honed.runtime.errors import HonedError

from .attack import Attack
from .bed import CONFIG, Bed, quietly, until
from .material.models import Victim
from .material.onnx_makers import right

_NAMES = tuple(f"kill-{i}" for i in range(5))
_COMPILER_FROM, _TUNER_FROM = 8.0, 12.0  # seconds of a round: they take long to start
# Two workers that were killed over one model are taken for its doing.
_REFUSED = ("FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "NOT_FOUND")
_UNSURE = ("UNAVAILABLE", "DEADLINE_EXCEEDED")  # the change may have been made


class Changes:
    """Adds, replaces and removes models; knows for each name what may be there, None for nothing."""

    def __init__(self, bed: Bed, rng: random.Random) -> None:
        self._bed = bed
        self._rng = rng
        self.possible: dict[str, set[Victim | None]] = {name: {None} for name in _NAMES}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._paused = threading.Lock()

    def start(self) -> None:
        """Go on with it in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the change under way."""
        self._done.set()
        self._thread.join()

    def paused(self) -> threading.Lock:
        """While it is held no change is under way."""
        return self._paused

    def _run(self) -> None:
        while not self._done.is_set():
            with self._paused:
                self._change()
            time.sleep(self._rng.uniform(0.0, 0.03))

    def _change(self) -> None:
        name = self._rng.choice(_NAMES)
        there = self.possible[name]
        removing = None not in there and self._rng.random() < 0.4
        victim = None if removing else Victim(self._rng.randrange(4, 300), self._rng.randrange(1000))
        self._bed.findings.offered(f"{'remove' if removing else 'add'} {name}")
        try:
            with self._bed.client(timeout=30) as client:
                if victim is None:
                    client.remove(name)
                else:
                    path = victim.write(self._bed.scratch / f"{name}.honed")
                    client.add(path, name=name, replace=True)
        except HonedError as error:
            self._bed.findings.answered({"code": error.code, "message": str(error)}, f"a change of {name}")
            if error.code in _UNSURE:
                there.add(victim)
            elif error.code not in _REFUSED:
                self._bed.findings.problem(f"a right change of {name} was told {error.code}: {error}")
            time.sleep(0.02)
        else:
            self.possible[name] = {victim}

    def compare(self, when: str) -> None:
        """Every name is what it may be, and answers right; from now on it is known."""
        findings = self._bed.findings
        with self._bed.client() as client:
            there = {model["name"]: model["state"] for model in client.models()}
            for name, possible in self.possible.items():
                if name not in there:
                    if None not in possible:
                        findings.lost += 1
                        findings.problem(f"{name} was acknowledged and is gone after {when}")
                    self.possible[name] = {None}
                    continue
                found = self._which(client, name, possible)
                if found is None:
                    findings.lost += 1
                    shown = sorted(str(each) for each in possible)
                    findings.problem(f"{name} ({there[name]}) is none of {shown} after {when}")
                else:
                    self.possible[name] = {found}

    def _which(self, client: Any, name: str, possible: set[Victim | None]) -> Victim | None:
        """The one of those possible that is there."""
        try:
            shape = client.metadata(name)["inputs"][0]["shape"]
            x = np.linspace(-2, 2, shape[0], dtype=np.float32)
            found = client.infer(name, {"x": x})["y"].tobytes()
        except HonedError as error:
            self._bed.findings.problem(f"{name} cannot be asked: {error.code} {error}")
            return None
        fitting = [
            v for v in possible if v is not None and v.n == shape[0] and v.answer(x).tobytes() == found
        ]
        return fitting[0] if fitting else None


class Kills(Attack):
    """Processes of the service end by SIGKILL."""

    name = "kills"
    what = "kill -9 of daemon, worker, builders, compiler and tuner under load: no acknowledged model is lost"
    allowed = frozenset({"UNAVAILABLE"})
    restarts = True
    least_seconds = 4.0

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        if seconds > _TUNER_FROM:
            bed.stop()
            bed.configure(CONFIG.replace("spawn = false", "spawn = true"))
            bed.restart()
        end = time.monotonic() + seconds
        changes = Changes(bed, random.Random(rng.random()))
        compiling = threading.Thread(target=self._compile, args=(bed, random.Random(rng.random()), end))
        changes.start()
        if seconds > _COMPILER_FROM:
            compiling.start()
        try:
            turn = rng.randrange(3)
            while time.monotonic() < end:
                time.sleep(rng.uniform(0.05, 0.8))
                kind: Callable[[Bed, random.Random, Changes], None] = (
                    self._kill_daemon if turn % 3 == 0 else self._kill_child
                )
                kind(bed, rng, changes)
                turn += 1
            bed.configure()  # the last daemon has no tuner
            self._kill_daemon(bed, rng, changes)
        finally:
            changes.stop()
            if compiling.ident is not None:
                compiling.join()
            bed.configure()
        if not bed.alive():
            return
        bed.ready()
        changes.compare("all")
        with bed.client() as client:
            for name in (*_NAMES, "compiled"):
                with contextlib.suppress(HonedError):
                    client.remove(name)

    def _kill_daemon(self, bed: Bed, rng: random.Random, changes: Changes) -> None:
        children = [p for p in bed.processes() if p.pid != bed.pid]
        bed.findings.offered("kill -9 of the daemon")
        bed.service.kill()
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.3))
        begun = time.monotonic()
        with changes.paused():
            if not until(lambda: not any(_lives(child) for child in children), 60.0):
                left = [" ".join(c.cmdline())[:100] for c in children if _lives(c)]
                bed.findings.problem(f"children outlive the daemon: {left}")
            bed.restart()
            changes.compare(f"kill -9 of the daemon, {time.monotonic() - begun:.1f} s ago")

    def _kill_child(self, bed: Bed, rng: random.Random, changes: Changes) -> None:
        """Any process below the daemon: what it is called may change, that it is replaced may not."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(bed.pid).children(recursive=True)
            kinds: dict[str, psutil.Process] = {}
            for child in children:
                kinds[_kind(child)] = child
            if not kinds:
                return
            name = rng.choice(sorted(kinds))
            bed.findings.offered(f"kill -9 of {name}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(kinds[name].pid, signal.SIGKILL)
        if rng.random() < 0.3 and not until(lambda: _serves(bed), 120.0):
            bed.findings.problem("the service is not ready 120 s after a child was killed")

    def _compile(self, bed: Bed, rng: random.Random, end: float) -> None:
        """ONNX files on their way, so that there is a compiler to kill."""
        path = bed.scratch / "compiled.onnx"
        path.write_bytes(right(rng).SerializeToString())
        while time.monotonic() < end:

            def add() -> None:
                with bed.client(timeout=30) as client:
                    client.add(path, name="compiled", shapes={"x": (2, 8)}, replace=True)

            quietly(add)
            time.sleep(0.2)


def _serves(bed: Bed) -> bool:
    with contextlib.suppress(HonedError), bed.client() as client:
        return client.ready()
    return False


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kind(process: psutil.Process) -> str:
    """The module that it runs."""
    command = process.cmdline()
    modules = [word for word in command if word.startswith("honed.")]
    return modules[-1] if modules else (command[0] if command else "a child that begins")
