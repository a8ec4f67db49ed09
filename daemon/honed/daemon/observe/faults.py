"""Faults of the GPU in the kernel log: watched for, and put down to the model that ran."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from honed.machine.kernellog import DatedFault, FaultStory, Reader, Record, Severity, group, open_reader, seen
from honed.machine.kernellog.story import LONGEST_S, RESET_QUIET_S
from honed.protocol.errors import HonedError
from honed.protocol.methods import METRICS, SERVER_STATUS
from honed.protocol.service import FaultFigures, KernelFault, KernelLog

if TYPE_CHECKING:
    from honed.jobs.events import Quarantined
    from honed.protocol.service import Metrics, Status


# ---- Faults of GPUs in the kernel log, and whose each was: a worker's, one of
# tuning, or another process's ----

SERVICE, CANDIDATE, OTHER, UNKNOWN = "service", "candidate", "other", "unknown"
WHOSE = {
    SERVICE: "a worker of the service",
    CANDIDATE: "a candidate of tuning, in quarantine",
    OTHER: "another process, none of the service",
    UNKNOWN: "whose it was is not known",
}


def kernel_log() -> KernelLog:
    """What the kernel log says since the machine started; or why it cannot be read. Blocking."""
    from honed.machine.kernellog import open_reader
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
    """Every fault in the log, oldest first."""
    from honed.machine.kernellog import group, seen

    found = [(record, fault) for record in _all(reader) if (fault := seen(record)) is not None]
    started = {fault.monotonic_s: record.realtime_s for record, fault in found}
    for story in group(fault for _, fault in found):
        yield listed(story, started[story.first_s])


def _all(reader: Reader) -> Iterator[Record]:
    while records := reader.read():
        yield from records


def listed(story: FaultStory, time: float) -> KernelFault:
    """A fault as `hone faults` lists it; `time` in seconds since 1970."""
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
class BlamedFault(KernelFault):
    """A fault, and `whose` it was: one of WHOSE."""

    whose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """The service that answers: ids of its `workers`, and since when it runs, in seconds since 1970."""

    workers: frozenset[int]
    since: float


def ours(metrics: Metrics, status: Status) -> Ours:
    """From what the service says of itself."""
    present = {device.worker.pid for device in status.devices}
    ended = {end.pid for device in metrics.devices for end in device.worker.last_ends}
    return Ours(workers=frozenset((present | ended) - {0}), since=metrics.time - metrics.uptime_seconds)


def of_service(socket: str | None) -> Ours | None:
    """The service that answers; None where none does, or it does not tell this user."""
    from honed.protocol.errors import PermissionDenied, Unavailable
    from honed.runtime.client import Client

    try:
        with Client(socket) as client:
            return ours(client.ask(METRICS), client.ask(SERVER_STATUS))
    except (Unavailable, PermissionDenied):
        return None


def blamed(
    log: KernelLog, service: Ours | None, quarantined: Iterable[Quarantined] = ()
) -> tuple[BlamedFault, ...]:
    """The faults of the kernel log with whose they were; `quarantined` as the records have them."""
    return tuple(
        BlamedFault(**asdict(fault), whose=whose(fault, service, quarantined)) for fault in log.faults
    )


def whose(fault: KernelFault, service: Ours | None, quarantined: Iterable[Quarantined]) -> str:
    """One of WHOSE.

    A process that is not known to be ours is another's only if it faulted while this service ran: an
    earlier one had workers of its own.
    """
    if any(record in (each.story or "") for each in quarantined for record in fault.records):
        return CANDIDATE
    if service is None or fault.process is None:
        return UNKNOWN
    if fault.process in service.workers:
        return SERVICE
    return OTHER if fault.time >= service.since else UNKNOWN


# ---- Follows the kernel log while the service runs: each fault of a GPU is told
# once, with whose it was ----
#
# What a fault costs is decided elsewhere, from the worker's own end: a record alone replaces nobody.

_log = logging.getLogger(__name__)


class KernelWatch:
    """Counts faults of GPUs and logs them; `workers` gives the processes that serve, or did lately."""

    def __init__(
        self, workers: Callable[[], Iterable[int]], opened: Callable[[], Reader] = open_reader
    ) -> None:
        self._workers = workers
        self._open = opened
        self._counts: Counter[str] = Counter()
        self._reason = "it was not opened yet"
        self._since = time.time()

    def figures(self) -> FaultFigures:
        """The part `gpu_faults` of Metrics: faults since the service started, by whose they were."""
        counts = {whose: self._counts[whose] for whose in (SERVICE, OTHER, UNKNOWN)}
        return FaultFigures(watched=not self._reason, reason=self._reason, counts=counts)

    async def run(self) -> None:
        """Until cancelled, or the log cannot be read."""
        # Here, since the tool reads what is above without the time that asyncio takes to load.
        from honed.daemon.aio import in_thread

        try:
            reader = await in_thread(self._open)
        except HonedError as error:
            self._unread(error)
            return
        self._reason = ""
        try:
            await self._follow(reader)
        except HonedError as error:
            self._unread(error)
        finally:
            reader.close()

    def _unread(self, error: HonedError) -> None:
        self._reason = str(error)
        _log.warning("faults of the GPU are not seen by the service: %s", error)

    async def _follow(self, reader: Reader) -> None:
        """A story is told when its last record is old enough that no other belongs to it."""
        import asyncio

        from honed.daemon.aio import in_thread

        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(reader.fileno(), readable.set)
        found: list[DatedFault] = []
        ids: frozenset[int] = frozenset()  # of the workers when their faults came: they may end at once
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(_due(found)):
                        await readable.wait()
                readable.clear()
                new = await in_thread(_read, reader)
                if new:
                    ids |= _with_threads(self._workers())
                    found += new
                due = _due(found)
                if due is not None and time.monotonic() >= due:
                    for story in group(found):
                        self._tell(story, ids | frozenset(self._workers()))
                    found, ids = [], frozenset()
        finally:
            loop.remove_reader(reader.fileno())

    def _tell(self, story: FaultStory, workers: frozenset[int]) -> None:
        # Only records written since it was opened are read, so all are of this service's time.
        fault = listed(story, self._since)
        found = whose(fault, Ours(workers=workers, since=self._since), ())
        self._counts[found] += 1
        _log.error(
            "a fault of GPU %s (%s: %s), of %s%s; the kernel log says: %s",
            fault.device or "",
            fault.driver,
            fault.meaning,
            WHOSE[found],
            f", process {fault.process}" if fault.process is not None else "",
            "; ".join(" ".join(record.split()) for record in fault.records)[:500],
        )


def _read(reader: Reader) -> list[DatedFault]:
    """New faults. In a thread: a driver's patterns are made when its first record comes."""
    return [fault for record in reader.read() if (fault := _of_gpu(record)) is not None]


def _of_gpu(record: Record) -> DatedFault | None:
    """The fault a record tells of; none where the kernel killed a process for want of memory."""
    fault = seen(record)
    return None if fault is None or fault.fault.severity is Severity.PROCESS_KILLED else fault


def _due(found: list[DatedFault]) -> float | None:
    """When what was found is told, in seconds of CLOCK_MONOTONIC."""
    if not found:
        return None
    return min(found[-1].monotonic_s + RESET_QUIET_S, found[0].monotonic_s + LONGEST_S)


def _with_threads(processes: Iterable[int]) -> frozenset[int]:
    """Page faults name a thread."""
    found = set(processes)
    for process in tuple(found):
        with suppress(OSError):
            found.update(int(thread) for thread in os.listdir(f"/proc/{process}/task"))
    return frozenset(found)
