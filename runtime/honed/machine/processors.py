"""The processors of a machine, from /sys, and those on which ONNX Runtime runs first.

Boards have kinds of cores: an RK3588 has four A55 and four A76. A run ends with its slowest thread, and a
thread on an A55 does less than half the work of one on an A76. So a model runs on the big cores, with one
thread for each; a second thread on a core with SMT would share its busy arithmetic units.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from .files import entries, system_number, system_text

BIG: Final = 0.8  # Share of the largest capacity; clocks of clusters of one kind differ by a few percent


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
