"""Implements `hone history`: how a model became faster, as a curve or a picture, and its versions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from honed.jobs.commands import ShowHistory
from honed.jobs.events import History
from honed.machine.files import replacing
from honed.protocol.errors import HonedError, NotFound, Unavailable
from honed.protocol.methods import MODEL_HISTORY
from honed.protocol.params import HistoryParams
from honed.protocol.results import LatencyPoint, ModelHistory
from honed.runtime.client import Client
from honed.tool.commands.records import add_state_dir_option, find_records
from honed.tool.compiler import follow, run, running_in_service
from honed.tool.output import Console, Output, line, moment_text, table
from honed.tool.parser import Parser, define
from honed.tool.view.plot import Curve, Mark, draw_picture, microseconds, text

from .tasks import milliseconds

_SPANS = ((60.0, "minutes"), (3600.0, "hours"), (86400.0, "days"))
_HEIGHT = 16  # Lines of the curve in a terminal


def define_history(history: Parser) -> None:
    """Define the arguments of `hone history`."""
    define(
        history,
        _history,
        details=(
            "The curve is the estimated time of one inference, the sum of its tasks' best times, over the "
            "candidates tried. With --served it is the time that inferences really took in the service, over "
            "hours. The table lists the versions served, what they took beside the one before, and why each "
            "came and went."
        ),
        examples=(
            "hone history lightglue\nhone history lightglue --served\n"
            "hone history lightglue --png lightglue.png"
        ),
    )
    history.add_argument(
        "--served", action="store_true", help="draw the latency measured in the service over time"
    )
    history.add_argument("model", metavar="M", help="name of the model")
    history.add_argument(
        "--png",
        metavar="FILE",
        type=Path,
        help="draw the curve into this file, too: an SVG file if its name ends in .svg",
    )
    add_state_dir_option(history)


def _history(arguments: argparse.Namespace, output: Output) -> None:
    served = _of_service(arguments)
    history, notes = _of_records(arguments, served)
    document = {
        "model": arguments.model,
        "points": history.points,
        "measured": history.versions,
        "served": served,
        "notes": notes,
        "png": None if arguments.png is None else str(arguments.png),
    }
    if arguments.served:
        curve = _service_curve(arguments.model, served.latency if served else ())
    else:
        curve = _curve(arguments.model, history)
    if arguments.png is not None:
        if curve is None:
            raise NotFound(f"nothing of {arguments.model} is recorded to be drawn; tune it or use it first")
        with replacing(arguments.png) as file:
            draw_picture(file, "svg" if arguments.png.suffix.lower() == ".svg" else "png", curve)

    def show(console: Console) -> None:
        if curve is not None:
            for drawn in text(curve, console.width, _HEIGHT, braille=_shows_braille()):
                line(console, drawn)
            console.print()
        for note in notes:
            line(console, f"note: {note}")
        if served:
            if served.engine_name:
                line(console, f"{served.name} is served by {served.engine_name} on {served.device}.")
            if served.session is not None:
                line(console, f"In ONNX Runtime a run takes {served.session}.")
            headings = (">version", "since", "before -> now", "why it came", "why it went")
            console.print(table(headings, list(version_rows(served))))
        else:
            _print_measured(console, arguments.model, history)
        if arguments.png is not None:
            line(console, f"The curve is drawn in {arguments.png}.")

    output.emit(document, show)


def _of_service(arguments: argparse.Namespace) -> ModelHistory | None:
    """Return the service's history of the model.

    Returns None if a folder is named instead, if no service answers, or if it does not know the model.
    """
    if arguments.state_dir is not None:
        return None
    try:
        with Client(arguments.socket) as client:
            return client.ask(MODEL_HISTORY, HistoryParams(name=arguments.model))
    except (NotFound, Unavailable):
        return None


def _of_records(
    arguments: argparse.Namespace, served: ModelHistory | None
) -> tuple[History, tuple[str, ...]]:
    """Return the history in the records of tuning, and notes.

    If it cannot be read but the service knows the model, a note says why.
    """
    try:
        where = find_records(arguments)
        if not where.by_service:
            return run(ShowHistory(records=where.path, name=arguments.model), "history"), ()
        with running_in_service(where.socket, ShowHistory, model=arguments.model) as child:
            return follow(child, "history"), ()
    except HonedError as error:
        if served is None:
            raise
        return History(points=(), versions=()), (str(error),)


def _service_curve(model: str, points: Sequence[LatencyPoint]) -> Curve | None:
    """Return the median latencies of the inferences served, over time; None if there were none."""
    if not points:
        return None
    size, unit = microseconds(max(point.us for point in points))
    begun = points[0].time
    span, x_name = next(
        each for each in _SPANS if points[-1].time - begun < 240 * each[0] or each is _SPANS[-1]
    )
    versions = {point.version: point for point in reversed(points)}
    return Curve(
        title=f"{model}: latency served over time",
        x_name=x_name,
        y_name=f"{unit} an inference",
        points=[((point.time - begun) / span, point.us / size) for point in points],
        marks=[
            Mark(x=(p.time - begun) / span, y=p.us / size, label=f"version {number}")
            for number, p in sorted(versions.items())
        ],
    )


def _curve(model: str, history: History) -> Curve | None:
    """Return the estimates over trials, in the unit that fits; None if there are none."""
    if not history.points:
        return None
    measured = [(version, version.us) for version in history.versions if version.us is not None]
    size, unit = microseconds(max((*(point.us for point in history.points), *(us for _, us in measured))))
    return Curve(
        title=f"{model}: estimated latency over trials",
        x_name="trials",
        y_name=f"{unit} an inference",
        points=[(point.trials, point.us / size) for point in history.points],
        marks=[
            Mark(x=version.trials, y=us / size, label=f"version {version.version}: {milliseconds(us)}")
            for version, us in measured
        ],
    )


def version_rows(history: ModelHistory) -> Iterable[tuple[str, ...]]:
    """Yield table rows: number, since, times side by side, why the version was published, why it ended."""
    versions = {version.number: version for version in history.versions}
    for span in history.deployments:
        version = versions[span.number]
        times = "-"
        if version.old_us and version.new_us:
            times = f"{milliseconds(version.old_us)} -> {milliseconds(version.new_us)}"
        since = datetime.fromtimestamp(span.since).astimezone().strftime("%Y-%m-%d %H:%M")
        yield str(version.number), since, times, version.why, span.end or version_state(history)
    served = {span.number for span in history.deployments}
    for version in history.versions:
        if version.number not in served:
            yield str(version.number), "never", "-", version.why, version.quarantine


def version_state(history: ModelHistory) -> str:
    """Return the states of the version served: "served", and also "pinned" or "on trial"."""
    states = ["served"]
    if history.pinned:
        states.append("pinned")
    if history.on_trial:
        states.append("on trial")
    return ", ".join(states)


def _print_measured(console: Console, model: str, history: History) -> None:
    rows = [
        (
            str(version.version),
            moment_text(version.time, "minutes"),
            str(version.trials),
            milliseconds(version.us) if version.us is not None else "-",
            version.why,
        )
        for version in history.versions
    ]
    if rows:
        console.print(table((">version", "since", ">trials", ">measured", "why"), rows))
    else:
        line(console, f"No tuned version of {model} was served yet.")


def _shows_braille() -> bool:
    """Return whether standard output shows braille, which the kernel's console lacks."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return encoding == "utf8" and os.environ.get("TERM") != "linux"
