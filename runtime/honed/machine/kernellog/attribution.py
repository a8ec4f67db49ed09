"""Whose fault was it? From what the records name, or else from what ran at that time. `attribute` is pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from .story import FaultStory

# Records are written a little after the deed, page faults by a work queue; clocks of the log drift a little.
LATE_S: Final = 0.25

_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # inode of the first pid namespace (linux/proc_ns.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """One candidate or request on the GPU, in seconds of CLOCK_MONOTONIC; `ended_s` None while it runs."""

    name: str
    started_s: float
    ended_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of ours that used the GPU, and what it ran.

    `ids` are its process and thread ids as the kernel log has them (see `ids_of`), also of threads that have
    ended; None where they cannot be known, in a container.
    """

    pid: int  # as the caller knows it
    ids: frozenset[int] | None
    runs: tuple[GpuRun, ...] = ()


class Certainty(StrEnum):
    """How a fault was attributed."""

    NAMED = "named"  # the records name one of our processes
    TIMING = "timing"  # they name nobody we could know; this process alone was on the GPU
    FOREIGN = "foreign"  # they name a process that is not ours
    UNKNOWN = "unknown"  # nobody of ours was on the GPU, or several were


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """`process` is None unless `certainty` is NAMED or TIMING; `runs` are what of its it can have been."""

    certainty: Certainty
    process: Process | None
    runs: tuple[GpuRun, ...]
    reason: str

    @property
    def run(self) -> GpuRun | None:
        """The one run that did it; None where several can have."""
        return self.runs[0] if len(self.runs) == 1 else None


def attribute(story: FaultStory, processes: Collection[Process]) -> Attribution:
    """The process among `processes` that caused `story`, and what it was running."""
    named = {number for number in (story.tgid, story.tid) if number is not None}
    if named:
        owners = [process for process in processes if process.ids is not None and named & process.ids]
        if len(owners) == 1:
            shown = " and ".join(str(number) for number in sorted(named))
            return _guilty(Certainty.NAMED, owners[0], story, f"the kernel log names process {shown}")
        if not owners and all(process.ids is not None for process in processes):
            shown = " and ".join(str(number) for number in sorted(named))
            return Attribution(
                certainty=Certainty.FOREIGN,
                process=None,
                runs=(),
                reason=f"the kernel log names process {shown}, which is not one of ours",
            )
    return _by_timing(story, processes)


def ids_of(pid: int, proc: str | os.PathLike[str] = "/proc") -> frozenset[int] | None:
    """Ids of process `pid` and of its threads now, as the kernel log has them: in the initial pid namespace.

    `pid` is the number `proc` knows it by. None where that cannot be told, because `proc` belongs to a
    container. Empty where there is no such process (any more). Call it after the process has made its GPU
    context, and add up what several calls give: threads end.
    """
    proc = Path(proc)
    try:
        if os.stat(proc / "self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:
            return None
    except OSError:
        return None
    return frozenset(_outermost(_statuses(proc / str(pid))))


def _statuses(folder: Path) -> Iterable[str]:
    """Contents of `status` of a process and its threads."""
    try:
        tasks = [folder, *(folder / "task").iterdir()]
    except OSError:  # it has ended
        return
    for task in tasks:
        try:
            yield (task / "status").read_text(errors="replace")
        except OSError:
            continue


def _outermost(statuses: Iterable[str]) -> Iterable[int]:
    """First number of each NSpid line: the id in the namespace of the /proc that was read."""
    for status in statuses:
        for line in status.splitlines():
            if line.startswith("NSpid:"):
                yield int(line.split()[1])


def _by_timing(story: FaultStory, processes: Iterable[Process]) -> Attribution:
    present = [process for process in processes if _running(process, story)]
    if len(present) == 1:
        return _guilty(Certainty.TIMING, present[0], story, "no other process of ours was on the GPU then")
    reason = (
        "several of our processes were on the GPU then" if present else "nothing of ours was on the GPU then"
    )
    return Attribution(certainty=Certainty.UNKNOWN, process=None, runs=(), reason=reason)


def _guilty(certainty: Certainty, process: Process, story: FaultStory, reason: str) -> Attribution:
    return Attribution(certainty=certainty, process=process, runs=_running(process, story), reason=reason)


def _running(process: Process, story: FaultStory) -> tuple[GpuRun, ...]:
    """What `process` ran when the story began, or had ended less than LATE_S before."""
    return tuple(
        run
        for run in process.runs
        if run.started_s <= story.first_s and (run.ended_s is None or story.first_s <= run.ended_s + LATE_S)
    )
