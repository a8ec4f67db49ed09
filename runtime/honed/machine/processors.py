"""The processors of a machine, from /sys, who uses them, and those on which ONNX Runtime runs first.

Boards have kinds of cores: an RK3588 has four A55 and four A76. A run ends with its slowest thread, and a
thread on an A55 does less than half the work of one on an A76. So a model runs on the big cores, with one
thread for each; a second thread on a core with SMT would share its busy arithmetic units.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from .files import entries, system_number, system_text

BIG: Final = 0.8  # Share of the largest capacity; clocks of clusters of one kind differ by a few percent
_TICKS = os.sysconf("SC_CLK_TCK")  # Per second, of times in /proc
_LEAST_TICKS = 10  # Ticks of all processors between two readings, for a meaningful share


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A processor in the scheduler's numbering; processors with one `core` are hardware threads of that core.

    `capacity` is its relative speed at its highest clock; 0 if the machine does not show it.
    """

    number: int
    core: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlacement:
    """Threads of one run, and the processors that they run on.

    0 threads: ONNX Runtime's choice. No processors: any.
    """

    threads: int
    processors: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the placement as text for users, as in "4 threads on processors 4-7"."""
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        return f"{threads} on processors {_spans(self.processors)}" if self.processors else threads


def processors(root: Path, allowed: Collection[int] | None = None) -> tuple[Processor, ...]:
    """Return the processors that are online, and in `allowed` if that is not None, by number.

    `root` is the root of the file system. The capacity is Arm's `cpu_capacity`, else the highest clock.
    Returns none if the machine does not show its processors.
    """
    found: list[Processor] = []
    for folder in entries(root / "sys/devices/system/cpu"):
        digits = folder.name.removeprefix("cpu")
        siblings = system_text(folder / "topology/thread_siblings_list")
        if not digits.isdecimal() or siblings is None or (allowed is not None and int(digits) not in allowed):
            continue
        first = siblings.partition(",")[0].partition("-")[0]
        capacity = system_number(folder / "cpu_capacity")
        if capacity is None:
            capacity = system_number(folder / "cpufreq/cpuinfo_max_freq")
        core = int(first) if first.isdecimal() else int(digits)
        found.append(Processor(number=int(digits), core=core, capacity=capacity or 0))
    return tuple(sorted(found, key=lambda each: each.number))


def half_arithmetic(root: Path) -> bool:
    """Return whether every processor has fp16 instructions that ONNX Runtime has kernels for.

    Those are Arm's, which /proc/cpuinfo lists for each processor.
    """
    lines = (system_text(root / "proc/cpuinfo") or "").splitlines()
    features = [line.partition(":")[2].split() for line in lines if line.startswith("Features")]
    return bool(features) and all("fphp" in each and "asimdhp" in each for each in features)


def first_placement(processors: Sequence[Processor], threads: int = 0) -> ThreadPlacement:
    """Return where ONNX Runtime's threads run until a better placement is known.

    That is one thread for each big core. `threads` overrides their number unless 0; more threads than big
    cores run on all processors.
    """
    largest = max((each.capacity for each in processors), default=0)
    big = [each for each in processors if each.capacity >= BIG * largest]
    cores = len({each.core for each in big})
    if len(big) == len(processors) or threads > cores:
        return ThreadPlacement(threads=threads or cores)
    return ThreadPlacement(threads=threads or cores, processors=tuple(each.number for each in big))


def _spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, as in "0-3,6"."""
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def cores(root: Path) -> int:
    """Return the number of processors online; 1 if it is not known."""
    count = 0
    for part in (system_text(root / "sys/devices/system/cpu/online") or "").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            count += int(last or first) - int(first) + 1
    return max(1, count)


class OtherLoadMeter:
    """A meter of the load by other programs than `own` processes and their descendants, since its creation.

    It blocks for some milliseconds.
    """

    def __init__(self, own: Collection[int], root: Path = Path("/")) -> None:
        self._own, self._root = own, root
        self._then = self._others()

    def percent(self) -> float | None:
        """Return the percentage that other programs took since the meter was created.

        Returns None if /proc does not say, or too few ticks have passed.
        """
        others, elapsed = (now - then for now, then in zip(self._others(), self._then, strict=True))
        return 100 * min(1.0, max(0.0, others) / elapsed) if elapsed >= _LEAST_TICKS / _TICKS else None

    def _others(self) -> tuple[float, float]:
        """Return seconds of all processors since the machine started: those of others, and all."""
        # proc_stat(5) has user, nice, system, idle, iowait, irq, softirq, steal; guests are in the first two.
        text = system_text(self._root / "proc/stat") or ""
        ticks = [_whole(word) for word in text.partition("\n")[0].split()[1:9]]
        if len(ticks) < 8:
            return 0.0, 0.0
        own = sum(tree_seconds(self._root, self._own).values())
        idle = ticks[3] + ticks[4]
        return (sum(ticks) - idle) / _TICKS - own, sum(ticks) / _TICKS


def tree_seconds(root: Path, pids: Collection[int]) -> dict[int, float]:
    """Return the CPU seconds of each process with its living descendants.

    Children of these processes that have ended and were waited for are included. A descendant of several
    counts for the nearest.
    """
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for folder in entries(root / "proc"):
        # By proc_pid_stat(5) the name in parentheses may hold anything; ppid is the second field after it,
        # utime, stime, cutime and cstime the twelfth to fifteenth.
        text = system_text(folder / "stat") or "" if folder.name.isdecimal() else ""
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
