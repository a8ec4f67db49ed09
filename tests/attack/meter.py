"""The stall meter: asks the daemon every 10 ms whether it lives, on a connection of its own.

A round trip, less the time that the daemon's threads and this process waited for a processor, is how long the
daemon's loop did something else. Run as `python -m tests.attack.meter SOCKET UID`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.daemon.raw import Raw

from . import users
from .aside import tell, turns

EVERY_SECONDS = 0.01
STALL_MS = 50.0
_KEPT = 20
_LIST_AGAIN = 5  # readings after which threads are looked up anew


@dataclass(frozen=True, slots=True)
class Reading:
    """Nanoseconds on the run queue, by thread, and of the machine's processors taken away by its host."""

    threads: dict[int, int]
    stolen: int

    def since(self, before: Reading) -> float:
        """Milliseconds: the sum over the processes' main threads, plus the longest of the other threads.

        Other threads matter where one holds what a main thread waits for; two at once delay it no longer.
        """
        mains, others = 0, 0
        for key, value in self.threads.items():
            waited = value - before.threads.get(key, value)
            if key < 0:
                mains += waited
            else:
                others = max(others, waited)
        return (mains + others + self.stolen - before.stolen) / 1e6


class Waits:
    """Reads the waits of some processes' threads; main threads have negative keys."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._files: dict[int, int] = {}
        self._readings = 0
        self._stat = os.open("/proc/stat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> Reading:
        """Now."""
        if self._readings % _LIST_AGAIN == 0:
            self._open()
        self._readings += 1
        found: dict[int, int] = {}
        for key, file in self._files.items():
            with contextlib.suppress(OSError, IndexError, ValueError):
                found[key] = int(os.pread(file, 100, 0).split()[1])
        return Reading(found, self._stolen())

    def close(self) -> None:
        """Give the descriptors back."""
        for file in (*self._files.values(), self._stat):
            os.close(file)
        self._files.clear()

    def _stolen(self) -> int:
        """In nanoseconds, over all processors: their host ran something else."""
        fields = os.pread(self._stat, 200, 0).split(b"\n", 1)[0].split()
        return int(fields[8]) * 10_000_000 if len(fields) > 8 else 0

    def _open(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        for pid in self._pids:
            with contextlib.suppress(OSError):
                for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                    path = f"/proc/{pid}/task/{thread}/schedstat"
                    key = -thread if thread == pid else thread
                    with contextlib.suppress(OSError):
                        self._files[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class Meter:
    """Pings over one connection after the other."""

    def __init__(self, socket: Path, uid: int) -> None:
        self._socket = socket
        self._uid = uid
        self._raw: Raw | None = None
        self._waits: Waits | None = None
        self._forget()

    def _forget(self) -> None:
        self._pings, self._worst, self._worst_raw = 0, 0.0, 0.0
        self._stalls: list[dict[str, float]] = []

    def take(self) -> dict[str, Any]:
        """What was seen since the last time."""
        told = {
            "pings": self._pings,
            "worst_ms": self._worst,
            "worst_raw_ms": self._worst_raw,
            "stalls": sorted(self._stalls, key=lambda stall: -stall["ms"])[:_KEPT],
        }
        self._forget()
        return told

    def ping(self) -> None:
        """Once; where there is no service, a connection is tried."""
        try:
            if self._raw is None:
                self._connect()
            else:
                self._measure(self._raw)
        except (OSError, AssertionError):
            self.leave()

    def leave(self) -> None:
        """End the connection, if there is one."""
        if self._raw is not None:
            self._raw.socket.close()
        if self._waits is not None:
            self._waits.close()
        self._raw = self._waits = None

    def _connect(self) -> None:
        self._raw = users.raw(self._socket, self._uid)
        self._waits = Waits(users.peer_pid(self._raw.socket), os.getpid())
        self._raw.socket.settimeout(60)
        self._raw.call(
            "ServerLive", {}
        )  # a daemon that starts has not begun to accept: this one is not counted

    def _measure(self, raw: Raw) -> None:
        assert self._waits is not None
        before, begun = self._waits.read(), time.monotonic()
        raw.call("ServerLive", {})
        ended, after = time.monotonic(), self._waits.read()
        whole = (ended - begun) * 1e3
        left = max(0.0, whole - after.since(before))
        self._pings += 1
        self._worst, self._worst_raw = max(self._worst, left), max(self._worst_raw, whole)
        if left > STALL_MS:
            self._stalls.append({"at": begun, "ms": left, "raw_ms": whole})


def main(arguments: list[str]) -> None:
    """Ping until the parent is gone."""
    meter = Meter(Path(arguments[0]), int(arguments[1]))
    for wanted in turns(EVERY_SECONDS):
        if wanted:
            tell(meter.take())
        meter.ping()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main(sys.argv[1:])
