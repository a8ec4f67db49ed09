"""What the kernel log says of faults of the GPU since the machine started. Blocking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from honed.protocol.faults import KernelFault, KernelLog

if TYPE_CHECKING:
    from honed.machine.kernellog import FaultStory, Reader, Record


def kernel_log() -> KernelLog:
    """What the kernel log says since the machine started; or why it cannot be read."""
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
