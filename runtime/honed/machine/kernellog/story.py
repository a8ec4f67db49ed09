"""Groups the records of one fault to one incident, and attributes it to a process.

One bug writes three to five records: a page fault, the bus faults of the queues that ran into it, the queues
ended for it, perhaps a reset. `group` joins those of one fault. `attribute` uses the processes that the
records name, or else what ran at that time. Both are pure: times are parameters.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .fault import CS_BUS_FAULT, Driver, Fault, Severity

QUIET_S: Final = 1.0  # Seconds of silence that end an incident
RESET_QUIET_S: Final = 5.0  # Seconds before a reset: kbase waits up to 3 s for jobs, then 0.5 s for the GPU
LONGEST_S: Final = 15.0  # Seconds of an incident; a process that keeps faulting makes several
# Seconds that records may be late: a work queue writes page faults, and the log's clocks drift a little.
LATE_S: Final = 0.25

_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # Inode of the first pid namespace (linux/proc_ns.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatedFault:
    """A fault and the time at which the kernel wrote it, in seconds of CLOCK_MONOTONIC."""

    fault: Fault
    monotonic_s: float


@dataclass(slots=True, eq=False)
class FaultIncident:
    """The records of one fault, oldest first, and their common facts. Facts in none of them are None."""

    seen: list[DatedFault]

    @property
    def first_s(self) -> float:
        """The time of its first record, seconds of CLOCK_MONOTONIC."""
        return self.seen[0].monotonic_s

    @property
    def last_s(self) -> float:
        """The time of its last record, seconds of CLOCK_MONOTONIC."""
        return self.seen[-1].monotonic_s

    @property
    def faults(self) -> list[Fault]:
        """The records without their times."""
        return [seen.fault for seen in self.seen]

    @property
    def driver(self) -> Driver:
        """The driver that wrote the records."""
        drivers = [fault.driver for fault in self.faults]
        return Driver.KBASE_JM if Driver.KBASE_JM in drivers else drivers[0]

    @property
    def device(self) -> str | None:
        """The first device that a record names."""
        return next((each.fault.device for each in self.seen if each.fault.device is not None), None)

    @property
    def severity(self) -> Severity:
        """The severity of the worst record."""
        return max((fault.severity for fault in self.faults), key=lambda severity: severity.rank)

    @property
    def tgid(self) -> int | None:
        """The first process that a record names."""
        return self._first_value("tgid")

    @property
    def tid(self) -> int | None:
        """The first thread that a record names."""
        return self._first_value("tid")

    @property
    def cause(self) -> Fault:
        """The record nearest to the cause: the first that is no consequence of another."""
        return next((fault for fault in self.faults if not self.is_consequence(fault)), self.faults[0])

    def is_consequence(self, fault: Fault) -> bool:
        """Return whether `fault`, one of this incident's, only follows from another record of it.

        A queue's bus fault does if there is a page fault, even if it was written first, as a work queue
        reports page faults.
        """
        return fault.consequence or (self.ends_context() and _is_stream_bus_fault(fault))

    def ends_context(self) -> bool:
        """Return whether one of its records ends every queue of a context, as a page fault does."""
        return any(each.fault.severity is Severity.CONTEXT for each in self.seen)

    def open_for(self, item: DatedFault) -> bool:
        """Return whether a record comes early enough to belong to it."""
        quiet = RESET_QUIET_S if item.fault.severity.rank >= Severity.RESET.rank else QUIET_S
        return item.monotonic_s - self.last_s <= quiet and item.monotonic_s - self.first_s <= LONGEST_S

    def on_device(self, fault: Fault) -> bool:
        """Return whether a fault is of this incident's device, or the kernel reports the end of its process.

        A record that names no device may be of any device of its driver. msm's records may name the GPU, the
        unit that powers it or the display; there is one GPU.
        """
        mine = self.seen[0].fault
        if Driver.KERNEL in (mine.driver, fault.driver):
            return fault.tgid is not None and fault.tgid == self.tgid
        device = self.device
        if mine.driver is fault.driver and (device is None or fault.device is None):
            return True
        return device == fault.device or {mine.driver, fault.driver} == {Driver.MSM}

    def agrees(self, fault: Fault, *fields: str) -> bool:
        """Return whether incident and fault do not contradict each other in any of `fields`."""
        return all(
            (mine := self._first_value(field)) is None
            or (theirs := getattr(fault, field)) is None
            or mine == theirs
            for field in fields
        )

    def _first_value(self, field: str) -> int | None:
        """Return the value of `field` in the first record that has one."""
        return next((value for s in self.seen if (value := getattr(s.fault, field)) is not None), None)


def group(seen: Iterable[DatedFault]) -> list[FaultIncident]:
    """Return one incident per (process, context, queue group) and span of time, sorted by start.

    A record that names no owner joins the only incident of its device at that time, or the one whose owner
    the driver announced just before; if several could own it, it is an incident of its own.
    """
    incidents: list[FaultIncident] = []
    growing: list[FaultIncident] = []
    for item in sorted(seen, key=lambda one: one.monotonic_s):
        growing = [each for each in growing if item.monotonic_s - each.last_s <= RESET_QUIET_S]
        home = _home(growing, item)
        if home is None:
            incidents.append(FaultIncident([item]))
            growing.append(incidents[-1])
        else:
            home.seen.append(item)
    return incidents


def _home(growing: list[FaultIncident], item: DatedFault) -> FaultIncident | None:
    """Return the incident in `growing` that `item` belongs to, or None."""
    fault = item.fault
    near = [each for each in growing if each.open_for(item) and each.on_device(fault)]
    near.sort(key=lambda each: each.last_s, reverse=True)
    if fault.tgid is not None:
        return _home_of_process(near, fault, fault.tgid)
    if fault.tid is not None:
        mine = [each for each in near if fault.tid in (each.tid, each.tgid)]
        return mine[0] if mine else _only([each for each in near if each.tid is None])
    if near and near[0].seen[-1].fault.announces:
        return near[0]
    fitting = [each for each in near if each.agrees(fault, "group", "address_space")]
    latest = [each for each in fitting if item.monotonic_s - each.last_s <= QUIET_S]
    return _only(latest or fitting)


def _home_of_process(near: list[FaultIncident], fault: Fault, tgid: int) -> FaultIncident | None:
    fitting = [each for each in near if each.agrees(fault, "tgid", "context", "group")]
    named = [each for each in fitting if each.tgid == tgid]
    if not named and (fault.consequence or _is_stream_bus_fault(fault)):
        # A page fault ends every group of its context: records of other groups add nothing.
        named = [e for e in near if e.tgid == tgid and e.agrees(fault, "context") and e.ends_context()]
    named += [each for each in fitting if each.tid == tgid]
    return named[0] if named else _only(fitting)


def _only(incidents: list[FaultIncident]) -> FaultIncident | None:
    return incidents[0] if len(incidents) == 1 else None


def _is_stream_bus_fault(fault: Fault) -> bool:
    return fault.code == CS_BUS_FAULT and fault.kind in ("cs-fault", "cs-fatal")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """A candidate or request on the GPU, in seconds of CLOCK_MONOTONIC; `ended_s` None while it runs."""

    name: str
    started_s: float
    ended_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of honed that used the GPU, and what it ran.

    `ids` are its process and thread ids in the kernel log (see `ids_of`), including threads that have ended;
    None if unknown, in a container.
    """

    ids: frozenset[int] | None
    runs: tuple[GpuRun, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The runs of one of our processes that may have caused an incident; none if it is unknown.

    `named`: the records name the process. Otherwise they name none that we could know, and no other process
    of ours was on the GPU then.
    """

    named: bool
    runs: tuple[GpuRun, ...] = ()


def attribute(story: FaultIncident, processes: Collection[Process]) -> Attribution:
    """Return what the process among `processes` that caused `story` ran."""
    named = {number for number in (story.tgid, story.tid) if number is not None}
    owners = [process for process in processes if process.ids is not None and named & process.ids]
    if len(owners) == 1:
        return Attribution(named=True, runs=_running(owners[0], story))
    if named and not owners and all(process.ids is not None for process in processes):
        return Attribution(named=False)  # The records name a stranger
    present = [runs for process in processes if (runs := _running(process, story))]
    return Attribution(named=False, runs=present[0] if len(present) == 1 else ())


def ids_of(pid: int, proc: str | os.PathLike[str] = "/proc") -> frozenset[int] | None:
    """Return the present ids of process `pid` and of its threads, as in the kernel log.

    They are ids in the initial pid namespace; `pid` is the process's number in `proc`. Returns None if the
    ids are unknown, because `proc` belongs to a container, and an empty set if the process does not exist
    (any more). Call it after the process has created its GPU context, and unite the results of several calls,
    as threads end.
    """
    proc = Path(proc)
    try:
        if os.stat(proc / "self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:
            return None
    except OSError:
        return None
    return frozenset(_outermost(_statuses(proc / str(pid))))


def _statuses(folder: Path) -> Iterable[str]:
    """Yield the contents of `status` of a process and of each of its threads."""
    try:
        tasks = [folder, *(folder / "task").iterdir()]
    except OSError:  # The process has ended
        return
    for task in tasks:
        try:
            yield (task / "status").read_text(errors="replace")
        except OSError:
            continue


def _outermost(statuses: Iterable[str]) -> Iterable[int]:
    """Yield the first number of each NSpid line: the id in the namespace of the /proc that was read."""
    for status in statuses:
        for line in status.splitlines():
            if line.startswith("NSpid:"):
                yield int(line.split()[1])


def _running(process: Process, story: FaultIncident) -> tuple[GpuRun, ...]:
    """Return what `process` ran when the incident began, or had ended less than LATE_S before."""
    return tuple(
        run
        for run in process.runs
        if run.started_s <= story.first_s and (run.ended_s is None or story.first_s <= run.ended_s + LATE_S)
    )
