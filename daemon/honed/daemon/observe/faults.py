"""Reads GPU faults from the kernel log, and attributes them: to a worker, a candidate or another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from honed.protocol.methods import METRICS, SERVER_STATUS
from honed.protocol.service import KernelFault, KernelLog, WorkerEnd

if TYPE_CHECKING:
    from honed.jobs.events import Quarantined
    from honed.machine.kernellog.reader import Reader, Record
    from honed.machine.kernellog.story import DatedFault, FaultIncident
    from honed.protocol.service import Metrics, Status


_CRASHES = ("crashed", "hung", "device")
SERVICE, CANDIDATE, OTHER, UNKNOWN = "service", "candidate", "other", "unknown"
WHOSE = {
    SERVICE: "a worker of the service",
    CANDIDATE: "a candidate of tuning, in quarantine",
    OTHER: "another process, none of the service",
    UNKNOWN: "whose it was is not known",
}


def kernel_log() -> KernelLog:
    """Return the faults in the kernel log since the machine started, or why it cannot be read (blocking)."""
    from honed.machine.kernellog.reader import open_reader
    from honed.protocol.errors import PermissionDenied, Unavailable

    try:
        reader = open_reader(from_start=True)
    except (PermissionDenied, Unavailable) as error:
        return KernelLog(readable=False, reason=str(error), faults=())
    try:
        return KernelLog(readable=True, reason="", faults=tuple(stories(reader)))
    finally:
        reader.close()


def stories(reader: Reader) -> Iterator[KernelFault]:
    """Yield every fault in the log, oldest first."""
    from honed.machine.kernellog.reader import find_fault
    from honed.machine.kernellog.story import group

    found: list[tuple[Record, DatedFault]] = []
    while records := reader.read():
        found += [(record, fault) for record in records if (fault := find_fault(record)) is not None]
    started = {fault.monotonic_s: record.realtime_s for record, fault in found}
    for story in group(fault for _, fault in found):
        yield fault_row(story, started[story.first_s])


def fault_row(story: FaultIncident, time: float) -> KernelFault:
    """Return a fault as `hone faults` lists it; `time` in seconds since 1970."""
    cause = story.cause
    return KernelFault(
        time=time,
        driver=str(story.driver),
        device=story.device,
        severity=str(story.severity),
        code=cause.code,
        meaning=cause.meaning or cause.name or cause.kind,
        process=story.tgid if story.tgid is not None else story.tid,
        command=next((fault.comm for fault in story.faults if fault.comm), None),
        records=tuple(fault.text for fault in story.faults),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributedFault(KernelFault):
    """A fault attributed to `whose`, one of WHOSE."""

    whose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedProcess(WorkerEnd):
    """A process of the service that crashed or hung, with the full name of its `engine`."""

    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProcesses:
    """The processes of the running service: ids of its `workers`, and its start in seconds since 1970.

    `ended` are its latest processes that crashed or hung, the oldest first.
    """

    workers: frozenset[int]
    since: float
    ended: tuple[EndedProcess, ...] = ()


def ours(metrics: Metrics, status: Status) -> ServiceProcesses:
    """Return the service's processes, from its metrics and status."""
    present = {device.worker.pid for device in status.devices}
    names = {device.name: device.spec or device.name for device in status.devices}
    ended = [
        EndedProcess(**asdict(end), engine=names.get(device.name, device.name))
        for device in metrics.devices
        for end in device.worker.last_ends
    ]
    return ServiceProcesses(
        workers=frozenset((present | {end.pid for end in ended}) - {0}),
        since=metrics.time - metrics.uptime_seconds,
        ended=tuple(sorted((end for end in ended if end.kind in _CRASHES), key=lambda end: end.time)),
    )


def of_service(socket: str | None) -> ServiceProcesses | None:
    """Return the processes of the service; None if it does not run or refuses this user."""
    from honed.protocol.errors import PermissionDenied, Unavailable
    from honed.runtime.client import Client

    try:
        with Client(socket) as client:
            return ours(client.ask(METRICS), client.ask(SERVER_STATUS))
    except (Unavailable, PermissionDenied):
        return None


def attribute_faults(
    log: KernelLog, service: ServiceProcesses | None, quarantined: Iterable[Quarantined] = ()
) -> tuple[AttributedFault, ...]:
    """Return the attributed faults of the kernel log; `quarantined` is from the records."""
    return tuple(
        AttributedFault(**asdict(fault), whose=whose(fault, service, quarantined)) for fault in log.faults
    )


def whose(fault: KernelFault, service: ServiceProcesses | None, quarantined: Iterable[Quarantined]) -> str:
    """Return to whom a fault is attributed, one of WHOSE.

    An unknown process is another's only if it faulted while this service ran, because earlier services had
    other workers.
    """
    if any(record in (each.story or "") for each in quarantined for record in fault.records):
        return CANDIDATE
    if service is None or fault.process is None:
        return UNKNOWN
    if fault.process in service.workers:
        return SERVICE
    return OTHER if fault.time >= service.since else UNKNOWN
