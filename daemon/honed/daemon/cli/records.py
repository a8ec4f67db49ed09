"""Command records: take what tuning has learned to another board of the same kind."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import Output, line
from .parser import Parser, add_command
from .recordsfile import add_state_dir_option, prepare, records_file, service_device

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 5  # refused lines that are shown to people


def register(commands: Any) -> None:
    """Add this command to the parser."""
    records = commands.add_parser(
        "records", help="export and import what tuning has learned", allow_abbrev=False
    )
    actions = records.add_subparsers(metavar="ACTION", required=True, parser_class=Parser, title="actions")
    export = add_command(
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
    import_ = add_command(
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


def _export(arguments: argparse.Namespace, output: Output) -> int:
    path = records_file(arguments)
    command = ["export", f"--records={path}", f"--output={arguments.output}"]
    if arguments.best:
        command.append("--best")
    done = run_records(command, "export")
    document = {"records": str(path), "output": str(arguments.output), "count": done["count"]}
    output.emit(
        document,
        lambda console: line(console, f"{done['count']} records are written to {arguments.output}."),
    )
    return 0


def _import(arguments: argparse.Namespace, output: Output) -> int:
    path = records_file(arguments)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    prepare(path)
    command = ["import", f"--records={path}"]
    device = arguments.device or service_device(arguments.socket)
    if device:
        command.append(f"--device={device}")
    done = run_records([*command, "--", str(arguments.file)], "import")
    document = {"records": str(path), **{key: done[key] for key in ("count", "merged", "refused")}}
    output.emit(document, lambda console: _print_imported(console, document))
    return 0


def _print_imported(console: Console, document: Mapping[str, Any]) -> None:
    refused = document["refused"]
    line(
        console,
        f"{document['count']} records are new, {document['merged']} were here already, "
        f"{len(refused)} cannot be used.",
    )
    for reason in refused[:_SHOWN]:
        line(console, f"  {reason}")
    if len(refused) > _SHOWN:
        line(console, f"  and {len(refused) - _SHOWN} more; --json shows them all")


def run_records(arguments: list[str], title: str) -> dict[str, Any]:
    """The last word of `python -m honed.tuner records ARGUMENTS`."""
    from honed.daemon.limits import Limits

    from . import compiler

    return compiler.run(["records", *arguments], title, Limits())
