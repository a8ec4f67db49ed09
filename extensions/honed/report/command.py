"""Draws the whole page, and implements `hone report`, which writes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from xml.etree.ElementTree import Element

from honed.machine.files import replacing
from honed.runtime.client import Client
from honed.tool.output import Console, Output, Reporter, bytes_text, line, seconds_text
from honed.tool.parser import Parser, define

from .contents import Report, gain, gather
from .markup import Ids, day, document, element, gain_text, name_of
from .models import card, overview
from .sections import faults_count, faults_section, machine_section, time_section, tuning_section

_PARTS = (
    ("models", "Models"),
    ("time", "Time on the devices"),
    ("tuning", "Tuning"),
    ("faults", "Faults"),
    ("machine", "Machine"),
)


def page(report: Report) -> str:
    """Return an HTML document that loads nothing and runs nothing."""
    ids = Ids()
    anchors = [f"model-{number}" for number in range(1, len(report.models) + 1)]
    cards = [card(model, anchor, ids) for model, anchor in zip(report.models, anchors, strict=True)]
    contents: dict[str, list[Element | None]] = {
        "models": [overview(report.models, anchors), *cards],
        "time": [
            element(
                "p",
                "Time in requests counts less the longer ago it was; it decides what is tuned first.",
                class_="about",
            ),
            time_section(report.models, ids),
        ],
        "tuning": [tuning_section(report)],
        "faults": [faults_section(report)],
        "machine": [machine_section(report)],
    }
    sections = [element("section", element("h2", title), *contents[name], id=name) for name, title in _PARTS]
    style = resources.files(__package__ or "").joinpath("page.css").read_text()
    return document(
        f"honed on {report.host}",
        style,
        element("a", "to the content", href="#content", class_="skip"),
        _header(report),
        element("main", _tiles(report), *sections, id="content"),
        _footer(report),
    )


def _header(report: Report) -> Element:
    links = [element("a", title, href=f"#{name}") for name, title in _PARTS]
    status = report.status
    return element(
        "header",
        element("h1", "honed on ", name_of(report.host)),
        element(
            "p",
            f"{day(report.made)}; version {status.version}, up {seconds_text(status.uptime_seconds)}",
            class_="about",
        ),
        element("nav", *links, aria_label="Parts of the page"),
    )


def _tiles(report: Report) -> Element:
    tiles = element("ul", class_="tiles")
    for name, figure, text in _figures(report):
        tiles.append(
            element(
                "li",
                element("span", name, class_="label"),
                element("strong", figure),
                element("span", text, class_="about"),
            )
        )
    return tiles


def _figures(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield the name of a tile, its figure, and a remark on the figure."""
    whole, models = report.metrics.whole, report.models
    ready = sum(model.figures.ready for model in models)
    yield "Models", str(len(models)), "all ready" if ready == len(models) else f"{ready} of them ready"
    failed = sum(whole.failures.values())
    yield "Requests", f"{whole.served:,}", f"{failed:,} failed" if failed else "none failed"
    recent = whole.recent
    latency = recent.latency.p99
    if latency is None:
        yield "Last minute", "quiet", "no request"
    else:
        yield "Last minute", f"{recent.per_second:.1f}/s", f"99 % within {latency * 1e3:.3g} ms"
    gains = [(won, model.listed.name) for model in models if (won := gain(model.history)) is not None]
    best = max(gains, default=None)
    yield "Best tuned", gain_text(best[0]) if best else "-", f"as fast: {best[1]}" if best else "nothing yet"
    found = faults_count(report)
    yield "Faults", str(found) if found else "none", "see below" if found else "seen so far"


def _footer(report: Report) -> Element:
    return element(
        "footer",
        element("h2", "Notes") if report.notes else None,
        *(element("p", note) for note in report.notes),
        element(
            "p",
            "Times are local, latencies are taken in the service. Quantiles are within 1 %. Versions are "
            "compared side by side, in turns, in the worker that serves; figures of different days are not.",
        ),
    )


def define_report(report: Parser) -> None:
    """Define the arguments of `hone report`."""
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
        report = gather(client, progress=lambda name, done: reporter.update(name, done, f"ask for {name}"))
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
