"""Farms of real processes: a scheduler and workers on loopback, with TLS, to watch and to kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[3]


class FarmProcess:
    """`python -m honed.tuner farm ...`."""

    def __init__(self, log: Path, *options: str) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "honed.tuner", "farm", *options],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            )
        self.log = log

    def hear(self) -> dict[str, Any]:
        """What it tells next; waits for it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        told: dict[str, Any] = json.loads(line)
        return told

    def hear_until(self, text: str) -> None:
        """Wait until it has told that."""
        while text not in self.hear().get("text", ""):
            pass

    def kill(self) -> None:
        """As a board that loses its power."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, if it has not."""
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> int:
        """Ask it to end; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def _free_port() -> int:
    """A port of this process that is free, below those that the kernel gives to others until it is taken."""
    for port in itertools.count(10_000 + os.getpid() % 20_000):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError


class RunningFarm:
    """A scheduler and the workers that were started; a context manager that leaves none behind."""

    def __init__(self, folder: Path, certificates: Path, cache_dir: Path) -> None:
        """`certificates` has folders pc and board, as `issue` makes them."""
        self.url = f"tls://127.0.0.1:{_free_port()}"
        self.folder, self.certificates, self.cache_dir = folder, certificates, cache_dir
        self.processes: list[FarmProcess] = []

    def __enter__(self) -> RunningFarm:
        self.start("scheduler", "pc").hear_until("may join")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.processes):
            process.close()

    def start(self, what: str, name: str, *options: str) -> FarmProcess:
        """A part of the farm with the certificate of `name`."""
        given = f"--certificates={self.certificates / name}"
        log = self.folder / f"{len(self.processes)}.log"
        self.processes.append(FarmProcess(log, what, given, *options, self.url))
        return self.processes[-1]

    def worker(self, *options: str) -> FarmProcess:
        """A board that is on its way."""
        return self.start("worker", "board", f"--cache-dir={self.cache_dir}", *(options or ("--alone",)))

    def board(self, *options: str) -> FarmProcess:
        """A board that has joined."""
        started = self.worker(*options)
        started.hear_until("in the farm at")
        return started
