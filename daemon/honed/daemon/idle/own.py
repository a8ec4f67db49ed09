"""Our own share of the CPU, so that the work of tuner and service is not taken for somebody else's.

The kernel's figures are decaying means: the load average over 60 s, pressure over 10 s. Our share is averaged
in the same way, so that it fades from both at the same pace when the work stops.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from honed.machine import sysfs

_LOAD_SECONDS = 60.0  # Documentation/filesystems/proc.rst, loadavg
_PRESSURE_SECONDS = 10.0  # Documentation/accounting/psi.rst, avg10
_TICKS = os.sysconf("SC_CLK_TCK")  # per second, of times in /proc/PID/stat


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What tuners and service add to the machine's figures: percent of all cores, tasks for each core."""

    cpu_percent: float = 0.0
    load_per_core: float = 0.0


class OwnShare:
    """The decaying means of the CPU time of some processes with their descendants; they may come and go."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seconds: dict[int, float] = {}
        self._at: float | None = None
        self._load = 0.0  # cores, mean of 60 s
        self._pressure = 0.0  # cores, mean of 10 s

    def measure(self, pids: Collection[int], now: float) -> Own:
        """The share of these processes with all their descendants; `now` in seconds of a steady clock.

        What a process used before it was named first does not count.
        """
        seconds = tree_seconds(self._root, pids)
        passed = now - self._at if self._at is not None else 0.0
        if passed > 0:
            spent = sum(max(0.0, used - self._seconds.get(pid, used)) for pid, used in seconds.items())
            self._load = _decayed(self._load, spent, passed, _LOAD_SECONDS)
            self._pressure = _decayed(self._pressure, spent, passed, _PRESSURE_SECONDS)
        self._seconds, self._at = seconds, now
        count = cores(self._root)
        return Own(cpu_percent=100 * self._pressure / count, load_per_core=self._load / count)


def _decayed(mean: float, spent: float, passed: float, over: float) -> float:
    kept = math.exp(-passed / over)
    return mean * kept + spent / passed * (1 - kept)


def tree_seconds(root: Path, pids: Collection[int]) -> dict[int, float]:
    """CPU seconds of each process, its living descendants, and those of their children that were waited for.

    A descendant of several counts for the nearest.
    """
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for folder in sysfs.entries(root / "proc"):
        # proc_pid_stat(5): the name in parentheses may hold anything; ppid is the second field after it,
        # utime, stime, cutime and cstime the twelfth to fifteenth.
        text = sysfs.read(folder / "stat") or "" if folder.name.isdecimal() else ""
        after = text.rpartition(")")[2].split()
        if len(after) > 14:
            parents[int(folder.name)] = _whole(after[1])
            spent[int(folder.name)] = sum(map(_whole, after[11:15])) / _TICKS
    totals = {pid: 0.0 for pid in pids if pid in spent}
    for pid, seconds in spent.items():
        nearest = _nearest(pid, totals, parents)
        if nearest is not None:
            totals[nearest] += seconds
    return totals


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _nearest(pid: int, wanted: Collection[int], parents: Mapping[int, int]) -> int | None:
    seen: set[int] = set()
    while pid not in seen:
        if pid in wanted:
            return pid
        seen.add(pid)
        pid = parents.get(pid, pid)
    return None


def cores(root: Path) -> int:
    """Processors that are online; 1 where the machine does not tell."""
    count = 0
    for part in (sysfs.read(root / "sys/devices/system/cpu/online") or "").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            count += int(last or first) - int(first) + 1
    return max(1, count)
