"""Who holds a candidate in flight, in words that can be checked after any crash."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, told from a later one with the same number and from one of another boot or container."""

    boot_id: str
    pid_namespace: int  # inode
    pid: int
    started: int  # clock ticks after boot

    @classmethod
    def this_process(cls) -> Self:
        """The calling process."""
        started = _started(os.getpid())
        assert started is not None  # it is running
        return cls(boot_id=_boot_id(), pid_namespace=_pid_namespace(), pid=os.getpid(), started=started)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of str()."""
        boot_id, pid_namespace, pid, started = text.split()
        return cls(boot_id=boot_id, pid_namespace=int(pid_namespace), pid=int(pid), started=int(started))

    def __str__(self) -> str:
        return f"{self.boot_id} {self.pid_namespace} {self.pid} {self.started}"

    def gone(self) -> bool:
        """Whether it certainly runs no more. Of another container of this boot that cannot be told: False."""
        if self.boot_id != _boot_id():
            return True
        return self.pid_namespace == _pid_namespace() and _started(self.pid) != self.started


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int | None:
    """When process `pid` started (proc(5), stat, field 22); None where it does not run or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(fields[18])
