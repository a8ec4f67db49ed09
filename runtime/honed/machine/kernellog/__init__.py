"""GPU faults in the kernel log: reads records, recognises faults, groups them, and finds their cause.

    reader = open_reader()
    faults = [fault for fault in map(find_fault, reader.read()) if fault is not None]
    for story in group(faults):
        attribution = attribute(story, processes)

Only reading the journal needs more than the standard library (systemd-python).
"""

from __future__ import annotations

from .fault import Driver, Fault, Severity
from .parse import parse
from .reader import SETTLE_S, Reader, Record, find_fault, open_reader
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
