"""GPU faults in the kernel log: reads records, recognises faults, groups them, and finds their cause.

    reader = open_reader()
    faults = [s for s in map(seen, reader.read()) if s is not None]
    for story in group(faults):
        attribution = attribute(story, processes)

Only reading the journal needs more than the standard library (systemd-python).
"""

from __future__ import annotations

from honed.protocol.errors import HonedError, PermissionDenied, Unavailable

from .fault import Driver, Fault, Severity
from .parse import parse
from .reader import SETTLE_S, JournalReader, KmsgReader, Reader, Record, find_fault
from .story import (
    LATE_S,
    Attribution,
    Certainty,
    DatedFault,
    FaultIncident,
    GpuRun,
    Process,
    attribute,
    group,
    ids_of,
)

__all__ = [
    "LATE_S",
    "SETTLE_S",
    "Attribution",
    "Certainty",
    "Driver",
    "Fault",
    "FaultIncident",
    "GpuRun",
    "Process",
    "Reader",
    "Record",
    "DatedFault",
    "Severity",
    "attribute",
    "group",
    "ids_of",
    "open_reader",
    "parse",
    "find_fault",
]


def open_reader(*, from_start: bool = False) -> Reader:
    """Return a reader of the journal if it can be read, else of /dev/kmsg.

    If neither can be read, raises PermissionDenied if a permission is missing, otherwise Unavailable, with
    both reasons.
    """
    reasons: list[HonedError] = []
    try:
        return JournalReader(from_start=from_start)
    except ImportError:
        reasons.append(Unavailable("the journal needs systemd-python; install python3-systemd"))
    except (PermissionDenied, Unavailable) as error:
        reasons.append(error)
    try:
        return KmsgReader(from_start=from_start)
    except (PermissionDenied, Unavailable) as error:
        reasons.append(error)
    denied = [reason for reason in reasons if isinstance(reason, PermissionDenied)]
    kind = PermissionDenied if denied else Unavailable
    raise kind("the kernel log cannot be read: " + "; ".join(str(reason) for reason in reasons))
