"""Watches the kernel log for faults of the GPU while the service runs.

A fault in the log has no effect by itself: only the end of a worker does. This file is separate because the
tool, which uses `faults.py`, starts without asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from honed.daemon.aio import in_thread
from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.reader import Reader, find_fault, open_reader
from honed.machine.kernellog.story import LONGEST_S, RESET_QUIET_S, DatedFault, FaultIncident, group
from honed.protocol.errors import HonedError
from honed.protocol.service import FaultFigures

from .faults import OTHER, SERVICE, UNKNOWN, WHOSE, ServiceProcesses, fault_row, whose

_log = logging.getLogger(__name__)


class KernelWatch:
    """A watcher that counts and logs faults of GPUs; `workers` returns present and recent workers."""

    def __init__(
        self, workers: Callable[[], Iterable[int]], opened: Callable[[], Reader] = open_reader
    ) -> None:
        self._workers = workers
        self._open = opened
        self._counts: Counter[str] = Counter()
        self._reason = "it was not opened yet"
        self._since = time.time()

    def figures(self) -> FaultFigures:
        """Return the field `gpu_faults` of Metrics: attributed faults since the service started."""
        counts = {whose: self._counts[whose] for whose in (SERVICE, OTHER, UNKNOWN)}
        return FaultFigures(watched=not self._reason, reason=self._reason, counts=counts)

    async def run(self) -> None:
        """Watch the kernel log until cancelled, or the log cannot be read."""
        try:
            reader = await in_thread(self._open)
        except HonedError as error:
            self._note_unreadable(error)
            return
        self._reason = ""
        try:
            await self._follow(reader)
        except HonedError as error:
            self._note_unreadable(error)
        finally:
            reader.close()

    def _note_unreadable(self, error: HonedError) -> None:
        self._reason = str(error)
        _log.warning("faults of the GPU are not seen by the service: %s", error)

    async def _follow(self, reader: Reader) -> None:
        """Report each group of faults when its last record is so old that no other can belong to it."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(reader.fileno(), readable.set)
        found: list[DatedFault] = []
        ids: frozenset[int] = frozenset()  # Workers at the time of the faults, as they may end at once
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

    def _tell(self, story: FaultIncident, workers: frozenset[int]) -> None:
        # The reader starts at the end of the log, so all records are from this service's time.
        fault = fault_row(story, self._since)
        found = whose(fault, ServiceProcesses(workers=workers, since=self._since), ())
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
    """Return new faults, without processes that the kernel killed because memory ran out.

    Call it in a thread: a driver's patterns are compiled at its first record.
    """
    found = [fault for record in reader.read() if (fault := find_fault(record)) is not None]
    return [each for each in found if each.fault.severity is not Severity.PROCESS_KILLED]


def _due(faults: list[DatedFault]) -> float | None:
    """Return when the faults found are reported, in seconds of CLOCK_MONOTONIC."""
    if not faults:
        return None
    return min(faults[-1].monotonic_s + RESET_QUIET_S, faults[0].monotonic_s + LONGEST_S)


def _with_threads(processes: Iterable[int]) -> frozenset[int]:
    """Return processes with their threads: page faults name a thread."""
    found = set(processes)
    for process in tuple(found):
        with suppress(OSError):
            found.update(int(thread) for thread in os.listdir(f"/proc/{process}/task"))
    return frozenset(found)
