"""Command report: the service on one page, to look at and to send."""

from __future__ import annotations

import argparse
from pathlib import Path

from honed.machine.files import replacing
from honed.runtime.client import Client
from honed.tool.output import Console, Output, Reporter, bytes_text, line
from honed.tool.parser import Parser, define

from .contents import gather
from .page import page


def define_report(report: Parser) -> None:
    """What `hone report` takes."""
    define(
        report,
        _report,
        details=(
            "The file needs nothing beside it, nothing from a network, and runs no script. For members of "
            "group honed; what tuning recorded is in it where you may change models."
        ),
        examples="hone report -o report.html\nhone report -o report.html --json",
    )
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the .html file to write"
    )


def _report(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client, Reporter("report") as reporter:
        report = gather(client, told=lambda name, done: reporter.update(name, done, f"ask for {name}"))
    text = page(report).encode()
    with replacing(arguments.output) as file:
        file.write(text)
    models = len(report.models)
    document = {
        "file": str(arguments.output),
        "bytes": len(text),
        "models": models,
        "notes": report.notes,
    }

    def show(console: Console) -> None:
        many = f"{models} model{'' if models == 1 else 's'}"
        line(console, f"{arguments.output} has the report: {many}, {bytes_text(len(text))}.")
        for note in report.notes:
            line(console, f"note: {note}")

    output.emit(document, show)
