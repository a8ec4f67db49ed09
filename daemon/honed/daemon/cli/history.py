"""Command history: how a model became faster, as a curve in the terminal and as a picture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import Output, line, table
from .parser import add_command
from .records import run_records
from .recordsfile import add_state_dir_option, records_file
from .tasks import milliseconds

if TYPE_CHECKING:
    from rich.console import Console

    from .plot import Curve

_HEIGHT = 16  # lines of the curve in a terminal


def register(commands: Any) -> None:
    """Add this command to the parser."""
    history = add_command(
        commands,
        "history",
        _history,
        about="show how tuning made a model faster",
        details=(
            "The curve is the estimated time of one inference, the sum of its tasks' best times, over the "
            "candidates tried. The versions that came of it were measured as a whole."
        ),
        examples="hone history lightglue\nhone history lightglue --png lightglue.png",
    )
    history.add_argument("model", metavar="M", help="name of the model")
    history.add_argument("--png", metavar="FILE", type=Path, help="draw the curve into this file, too")
    add_state_dir_option(history)


def _history(arguments: argparse.Namespace, output: Output) -> int:
    path = records_file(arguments)
    told = run_records(["history", f"--records={path}", f"--name={arguments.model}"], "history")
    document = {
        "model": arguments.model,
        "points": told["points"],
        "versions": told["versions"],
        "png": None if arguments.png is None else str(arguments.png),
    }
    curve = _curve(document)
    if arguments.png is not None:
        _draw(arguments.png, curve, arguments.model)
    output.emit(document, lambda console: _print(console, document, curve))
    return 0


def _curve(document: Mapping[str, Any]) -> Curve | None:
    """The estimates over trials, in the unit that fits; None where there is none."""
    from .plot import Curve, Mark, microseconds

    points, versions = document["points"], [v for v in document["versions"] if v["us"] is not None]
    if not points:
        return None
    size, unit = microseconds(max(each["us"] for each in (*points, *versions)))
    return Curve(
        title=f"{document['model']}: estimated latency over trials",
        x_name="trials",
        y_name=f"{unit} an inference",
        points=[(point["trials"], point["us"] / size) for point in points],
        marks=[
            Mark(x=v["trials"], y=v["us"] / size, label=f"version {v['version']}: {milliseconds(v['us'])}")
            for v in versions
        ],
    )


def _draw(path: Path, curve: Curve | None, model: str) -> None:
    from honed.runtime.errors import NotFound
    from honed.runtime.files import replacing

    from .picture import png

    if curve is None:
        raise NotFound(f"no trial of {model} is recorded to be drawn; run 'hone tune {model}' first")
    with replacing(path) as file:
        file.write(png(curve))


def _print(console: Console, document: Mapping[str, Any], curve: Curve | None) -> None:
    if curve is not None:
        from .plot import text

        for drawn in text(curve, console.width, _HEIGHT, braille=_shows_braille()):
            line(console, drawn)
        console.print()
    rows = [
        (
            str(version["version"]),
            datetime.fromtimestamp(version["time"]).astimezone().isoformat(" ", "minutes"),
            str(version["trials"]),
            milliseconds(version["us"]) if version["us"] is not None else "-",
            version["why"],
        )
        for version in document["versions"]
    ]
    if rows:
        console.print(table((">version", "since", ">trials", ">measured", "why"), rows))
    else:
        line(console, f"No tuned version of {document['model']} was served yet.")
    if document["png"]:
        line(console, f"The curve is drawn in {document['png']}.")


def _shows_braille() -> bool:
    """Whether standard output can be expected to: the console of the kernel has no such letters."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return encoding == "utf8" and os.environ.get("TERM") != "linux"
