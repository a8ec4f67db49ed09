"""Implements `hone faults`: candidates that must not run again, and GPU faults in the kernel log."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from honed.daemon.observe.faults import (
    WHOSE,
    AttributedFault,
    EndedProcess,
    attribute_faults,
    kernel_log,
    of_service,
)
from honed.jobs.commands import ListFaults
from honed.jobs.events import Faults, Quarantined
from honed.protocol.service import KernelLog
from honed.tool.commands.records import RecordsLocation, add_state_dir_option, find_records
from honed.tool.compiler import follow, run, running_in_service
from honed.tool.output import Console, Output, capital, line, moment_text
from honed.tool.parser import Parser, define

REACH = {
    "out-of-memory": "GPU memory ran out",
    "queue": "one queue was lost",
    "context": "every queue of the process was lost",
    "process-killed": "the kernel killed the process",
    "reset": "the GPU was reset",
    "device-lost": "the GPU is lost until the machine starts again",
}


def define_faults(faults: Parser) -> None:
    """Define the arguments of `hone faults`."""
    define(
        faults,
        _faults,
        details=(
            "A candidate that faulted, hung, or was running when the machine went down is never run again on "
            "this device. Faults of the GPU are read from the kernel log since the machine started."
        ),
        examples="hone faults\nhone faults --json",
    )
    add_state_dir_option(faults)


def _faults(arguments: argparse.Namespace, output: Output) -> None:
    where = find_records(arguments)
    quarantine, log = _read(where)
    found = quarantine.faults
    service = of_service(arguments.socket)
    faults = attribute_faults(log, service, found)
    document = {
        "records": str(where.path),
        "quarantined": found,
        "ended_processes": service.ended if service is not None else None,
        "kernel_log": {"readable": log.readable, "reason": log.reason, "faults": faults},
    }

    def show(console: Console) -> None:
        _print_quarantine(console, found)
        console.print()
        if service is not None:
            _print_ended(console, service.ended)
            console.print()
        _print_log(console, log, faults)

    output.emit(document, show)


def _read(where: RecordsLocation) -> tuple[Faults, KernelLog]:
    """Return the quarantined candidates of the records, and the kernel log.

    If the service is asked for the records, the kernel log is as the service reads it.
    """
    if where.by_service:
        with running_in_service(where.socket, ListFaults) as child:
            return follow(child, "faults"), child.answered.kernel_log or kernel_log()
    there = where.path.exists()
    return run(ListFaults(records=where.path), "faults") if there else Faults(faults=()), kernel_log()


def _print_log(console: Console, log: KernelLog, faults: Sequence[AttributedFault]) -> None:
    if not log.readable:
        line(console, f"{capital(log.reason)}.")
    elif not faults:
        line(console, "The kernel log holds no fault of a GPU since the machine started.")
    else:
        many = len(faults)
        line(
            console, f"The kernel log holds {many} fault{'s' if many > 1 else ''} since the machine started:"
        )
    for fault in faults:
        by = f", process {fault.process}" if fault.process is not None else ""
        by += f" ({fault.command})" if fault.command else ""
        whose = f"{fault.driver} {fault.device or ''}{by}: {WHOSE[fault.whose]}"
        reach = f"{fault.meaning}: {REACH[fault.severity]}"
        _print_entry(console, fault.time, reach, whose, records="\n".join(fault.records))


def _print_ended(console: Console, ended: Sequence[EndedProcess]) -> None:
    if not ended:
        line(console, "No process of the service has crashed or hung since it started.")
        return
    line(console, "The latest processes of the service that crashed or hung:")
    for each in ended:
        _print_entry(console, each.time, f"{each.engine}, process {each.pid}: {each.kind}", each.reason)


def _print_quarantine(console: Console, quarantined: Sequence[Quarantined]) -> None:
    if not quarantined:
        line(console, "No candidate is in quarantine.")
        return
    many = len(quarantined)
    line(console, f"{many} candidate{'s are' if many > 1 else ' is'} in quarantine and not run again:")
    for each in quarantined:
        outcome = f"{each.name or each.task}: {each.outcome or 'no verdict'}"
        candidate = f"candidate {each.candidate}, {each.device}, driver {each.driver_version}"
        records = "" if each.story is None or each.story == each.reason else each.story
        _print_entry(console, each.time, outcome, each.reason, candidate, records=records)


def _print_entry(console: Console, time: float, what: str, *details: str, records: str = "") -> None:
    console.print()
    line(console, f"{moment_text(time)}  {what}", "bold")
    for text in (*(f"  {each}" for each in details), *(f"    {each}" for each in records.splitlines())):
        line(console, text)
