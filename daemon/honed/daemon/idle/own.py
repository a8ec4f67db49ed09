"""The tuner's own share of the CPU, so that its work is not taken for somebody else's.

The kernel's figures are decaying means: the load average over 60 s, pressure over 10 s. The tuner's share is
averaged in the same way, so that it fades from both at the same pace when the tuner stops.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from . import tree
from .pressure import cores

_LOAD_SECONDS = 60.0  # Documentation/filesystems/proc.rst, loadavg
_PRESSURE_SECONDS = 10.0  # Documentation/accounting/psi.rst, avg10
_TICKS = os.sysconf("SC_CLK_TCK")  # per second, of times in /proc/PID/stat


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What the tuner adds to the machine's figures: `cpu_percent` of all cores, `load_per_core` in cores."""

    cpu_percent: float = 0.0
    load_per_core: float = 0.0


class OwnShare:
    """The decaying means of one process tree's CPU time; the tree may change or be missing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pid: int | None = None
        self._seconds = 0.0
        self._at: float | None = None
        self._load = 0.0  # cores, mean of 60 s
        self._pressure = 0.0  # cores, mean of 10 s

    def measure(self, pid: int | None, now: float) -> Own:
        """The share of process `pid` with its descendants (None: nobody tunes).

        `now` is in seconds of a steady clock.
        """
        seconds = tree_seconds(self._root, pid) if pid is not None else 0.0
        passed = now - self._at if self._at is not None else 0.0
        if passed > 0:
            spent = max(0.0, seconds - self._seconds) if pid == self._pid and pid is not None else 0.0
            self._load = _decayed(self._load, spent, passed, _LOAD_SECONDS)
            self._pressure = _decayed(self._pressure, spent, passed, _PRESSURE_SECONDS)
        self._pid, self._seconds, self._at = pid, seconds, now
        count = cores(self._root)
        return Own(cpu_percent=100 * self._pressure / count, load_per_core=self._load / count)


def _decayed(mean: float, spent: float, passed: float, over: float) -> float:
    kept = math.exp(-passed / over)
    return mean * kept + spent / passed * (1 - kept)


def tree_seconds(root: Path, pid: int) -> float:
    """CPU seconds of a process, its living descendants, and those of their children that were waited for."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for folder in tree.entries(root / "proc"):
        # proc_pid_stat(5): the name in parentheses may hold anything; ppid is the second field after it,
        # utime, stime, cutime and cstime the twelfth to fifteenth.
        after = (
            (tree.read(folder / "stat") or "").rpartition(")")[2].split() if folder.name.isdecimal() else []
        )
        if len(after) > 14:
            parents[int(folder.name)] = int(after[1])
            spent[int(folder.name)] = sum(map(int, after[11:15])) / _TICKS
    return sum(seconds for each, seconds in spent.items() if _descends(each, pid, parents))


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    seen: set[int] = set()
    while pid not in seen:
        if pid == ancestor:
            return True
        seen.add(pid)
        pid = parents.get(pid, pid)
    return False
