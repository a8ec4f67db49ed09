"""Implements `hone records`, which moves what tuning has learned to another board of the same kind."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from honed.jobs.commands import Export, Import
from honed.jobs.events import Exported, Imported
from honed.machine.files import replacing
from honed.protocol.errors import Internal
from honed.runtime.calling.files import open_model
from honed.tool.compiler import follow, run, running_in_service
from honed.tool.output import Console, Output, line
from honed.tool.parser import Parser, add_action, add_actions
from honed.tool.recordsfile import (
    RecordsLocation,
    add_state_dir_option,
    find_records,
    prepare,
    service_device,
)

_SHOWN = 5  # Maximum refused lines shown to people


def define_records(records: Parser) -> None:
    """Define the arguments of `hone records`."""
    actions = add_actions(records)
    export = add_action(
        actions,
        "export",
        _export,
        about="write the records of tuning as JSON lines",
        details=(
            "Another board with the same device can import them. Everything that was measured goes along, "
            "what is in quarantine too; with --best only the fastest schedule of each task."
        ),
        examples="hone records export -o records.jsonl\nhone records export --best -o best.jsonl",
    )
    export.add_argument("-o", "--output", metavar="F", type=Path, required=True, help="the file to write")
    export.add_argument("--best", action="store_true", help="only the best of each task")
    import_ = add_action(
        actions,
        "import",
        _import,
        about="take in records that a board with the same device exported",
        details=(
            "Records of another driver or compiler version are measured again before they are used, and none "
            "is served before it has been checked here."
        ),
        examples="hone records import best.jsonl\nhone tune lightglue --minutes 5",
    )
    import_.add_argument("file", metavar="F", type=Path, help="the file to read")
    import_.add_argument(
        "--device", metavar="SPEC", help="OpenCL device the records are of (default: the service's)"
    )
    for parser in (export, import_):
        add_state_dir_option(parser)


def _export(arguments: argparse.Namespace, output: Output) -> None:
    where = find_records(arguments)
    if where.by_service:
        done = _export_by_service(where, arguments)
    else:
        done = run(Export(records=where.path, output=arguments.output, best=arguments.best), "export")
    document = {"records": str(where.path), "output": str(arguments.output), "count": done.count}
    output.emit(
        document,
        lambda console: line(console, f"{done.count} records are written to {arguments.output}."),
    )


def _export_by_service(where: RecordsLocation, arguments: argparse.Namespace) -> Exported:
    with replacing(arguments.output) as file:  # Opened first: one that cannot be written fails at once
        with running_in_service(where.socket, Export, best=arguments.best) as child:
            done = follow(child, "export")
            if len(child.descriptors) != 1:
                raise Internal("the service sent no records; compare versions")
            with open(child.descriptors.pop(), "rb") as sent:
                shutil.copyfileobj(sent, file, 1 << 20)
        return done


def _import(arguments: argparse.Namespace, output: Output) -> None:
    where = find_records(arguments)
    if where.by_service:
        descriptor = open_model(arguments.file)
        try:
            with running_in_service(where.socket, Import, [descriptor], device=arguments.device) as child:
                done = follow(child, "import")
        finally:
            os.close(descriptor)
    else:
        where.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        prepare(where.path)
        device = arguments.device or service_device(arguments.socket)
        done = run(Import(records=where.path, file=arguments.file, device=device), "import")
    document = {"records": str(where.path), **asdict(done)}
    output.emit(document, lambda console: _print_imported(console, done))


def _print_imported(console: Console, done: Imported) -> None:
    refused = done.refused
    line(
        console,
        f"{done.count} records are new, {done.merged} were here already, {len(refused)} cannot be used.",
    )
    for reason in refused[:_SHOWN]:
        line(console, f"  {reason}")
    if len(refused) > _SHOWN:
        line(console, f"  and {len(refused) - _SHOWN} more; --json shows them all")
