"""Command faults: candidates that must not run again, and what the kernel log says of the GPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from .culprits import WHOSE, of_service, whose
from .output import Output, line
from .parser import add_command
from .records import run_records
from .recordsfile import add_state_dir_option, records_file

if TYPE_CHECKING:
    from rich.console import Console

    from honed.runtime.kernellog import FaultStory, Reader, Record

_REACH = {
    "out-of-memory": "GPU memory ran out",
    "queue": "one queue was lost",
    "context": "every queue of the process was lost",
    "process-killed": "the kernel killed the process",
    "reset": "the GPU was reset",
    "device-lost": "the GPU is lost until the machine starts again",
}


def register(commands: Any) -> None:
    """Add this command to the parser."""
    faults = add_command(
        commands,
        "faults",
        _faults,
        about="list candidates in quarantine and faults of the GPU",
        details=(
            "A candidate that faulted, hung, or was running when the machine went down is never run again on "
            "this device. Faults of the GPU are read from the kernel log since the machine started."
        ),
        examples="hone faults\nhone faults --json",
    )
    add_state_dir_option(faults)


def _faults(arguments: argparse.Namespace, output: Output) -> int:
    path = records_file(arguments)
    found = run_records(["faults", f"--records={path}"], "faults")["faults"] if path.exists() else []
    log, service = kernel_log(), of_service(arguments.socket)
    log["faults"] = [{**fault, "whose": whose(fault, service, found)} for fault in log["faults"]]
    document = {"records": str(path), "quarantined": found, "kernel_log": log}
    output.emit(document, lambda console: _print(console, document))
    return 0


def kernel_log() -> dict[str, Any]:
    """What the kernel log says since the machine started; or why it cannot be read."""
    from honed.runtime.errors import PermissionDenied, Unavailable
    from honed.runtime.kernellog import open_reader

    try:
        reader = open_reader(from_start=True)
    except (PermissionDenied, Unavailable) as error:
        return {"readable": False, "reason": str(error), "faults": []}
    try:
        return {"readable": True, "reason": "", "faults": list(stories(reader))}
    finally:
        reader.close()


def stories(reader: Reader) -> Iterator[dict[str, Any]]:
    """Every fault in the log, oldest first."""
    from honed.runtime.kernellog import group, seen

    found = [(record, fault) for record in _all(reader) if (fault := seen(record)) is not None]
    started = {fault.monotonic_s: record.realtime_s for record, fault in found}
    for story in group(fault for _, fault in found):
        yield _story(story, started[story.first_s])


def _all(reader: Reader) -> Iterator[Record]:
    while records := reader.read():
        yield from records


def _story(story: FaultStory, time: float) -> dict[str, Any]:
    cause = story.cause
    return {
        "time": time,
        "driver": str(story.driver),
        "device": story.device,
        "severity": str(story.severity),
        "code": cause.code,
        "meaning": cause.meaning or cause.name or cause.kind,
        "process": story.tgid if story.tgid is not None else story.tid,
        "command": next((fault.comm for fault in story.faults if fault.comm), None),
        "records": [fault.text for fault in story.faults],
    }


def _print(console: Console, document: Mapping[str, Any]) -> None:
    _print_quarantine(console, document["quarantined"])
    console.print()
    log = document["kernel_log"]
    if not log["readable"]:
        line(console, f"{log['reason'][:1].upper()}{log['reason'][1:]}.")
    elif not log["faults"]:
        line(console, "The kernel log holds no fault of a GPU since the machine started.")
    else:
        many = len(log["faults"])
        line(
            console, f"The kernel log holds {many} fault{'s' if many > 1 else ''} since the machine started:"
        )
    for fault in log["faults"]:
        console.print()
        by = f", process {fault['process']}" if fault["process"] is not None else ""
        by += f" ({fault['command']})" if fault["command"] else ""
        line(console, f"{_date(fault['time'])}  {fault['meaning']}: {_REACH[fault['severity']]}", "bold")
        line(console, f"  {fault['driver']} {fault['device'] or ''}{by}: {WHOSE[fault['whose']]}")
        for record in fault["records"]:
            _indented(console, record)


def _print_quarantine(console: Console, quarantined: Sequence[Mapping[str, Any]]) -> None:
    if not quarantined:
        line(console, "No candidate is in quarantine.")
        return
    many = len(quarantined)
    line(console, f"{many} candidate{'s are' if many > 1 else ' is'} in quarantine and not run again:")
    for each in quarantined:
        console.print()
        name = each["name"] or each["task"]
        line(console, f"{_date(each['time'])}  {name}: {each['outcome'] or 'no verdict'}", "bold")
        line(console, f"  {each['reason']}")
        line(console, f"  candidate {each['candidate']}, {each['device']}, driver {each['driver_version']}")
        if each["story"] and each["story"] != each["reason"]:
            _indented(console, each["story"])


def _indented(console: Console, text: str) -> None:
    for part in text.splitlines():
        line(console, f"    {part}")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
