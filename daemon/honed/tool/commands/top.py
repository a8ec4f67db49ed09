"""Implements `hone top`: the service at work, live in a terminal, or as one table elsewhere."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from honed.protocol.errors import Unavailable
from honed.protocol.methods import METRICS
from honed.protocol.params import TuningFigures
from honed.protocol.service import DurationSummary, Metrics, ModelFigures
from honed.protocol.values import engine_name
from honed.runtime.client import Client
from honed.tool.output import (
    Console,
    Output,
    RenderableType,
    Table,
    clean,
    console,
    fields,
    line,
    seconds_text,
    table,
)
from honed.tool.parser import Parser, define, seconds
from honed.tool.view.tables import NO_MODELS

from .tasks import short

_AROUND = 14  # Lines of the view besides the models
_WIDE = 100  # Minimum columns of a terminal that shows everything
_NARROW = 64  # Columns below which only the most important is shown
_COLUMN = 10  # Columns of one figure
_NAME = 8  # Minimum letters shown of a model's name
_Column = tuple[str, Callable[[ModelFigures], str]]  # Heading of a column, and its cell in a row
_END = ("q", "Q", "\x04")  # Keys that end it, besides Ctrl-C


def define_top(top: Parser) -> None:
    """Define the arguments of `hone top`."""
    define(
        top,
        _top,
        details=(
            "Rates and latencies are of the last minute, and of all time for models without a request in it. "
            "Below a model are the shapes that have a compiled form of their own, with the requests that it "
            "answered. q or Ctrl-C ends. Without a terminal it prints one table."
        ),
        examples="hone top\nhone top --interval 0.5\nhone top --json",
    )
    top.add_argument(
        "--interval", metavar="S", type=seconds, default=1.0, help="seconds between two looks (default 1)"
    )


def _top(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        document = client.ask(METRICS)
        if output.json or not sys.stdout.isatty():
            output.emit(document, lambda console: _print(console, document))
            return
        _watch(client, document, arguments.interval)


def _print(console: Console, document: Metrics) -> None:
    console.print(_summary(document))
    if document.models:
        console.print()
        console.print(models_table(document, console.width, len(_rows(document))))
    else:
        line(console, NO_MODELS)


def _watch(client: Client, document: Metrics, interval: float) -> None:
    """Show the service until the user ends it; wait for a service that stops."""
    from rich.live import Live

    shown = console(sys.stdout, follow=True)
    trouble = ""

    def view() -> RenderableType:
        return render(document, shown.size.width, shown.size.height, trouble)

    # The last view stays on the screen when the user ends it.
    with _keys() as pressed, Live(get_renderable=view, console=shown, auto_refresh=False) as live:
        try:
            while True:
                live.refresh()
                if pressed(interval) in _END:
                    return
                try:
                    document, trouble = client.ask(METRICS), ""
                except Unavailable as error:
                    trouble = str(error)
        except KeyboardInterrupt:
            return


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits a number of seconds for a key and returns it, or "".

    The terminal is restored at the end.
    """
    if not sys.stdin.isatty():
        yield partial(_key, [])
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield partial(_key, [descriptor])
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key(descriptors: list[int], wait: float) -> str:
    ready, _, _ = select.select(descriptors, [], [], wait)
    return os.read(ready[0], 1).decode(errors="replace") if ready else ""


def render(document: Metrics, width: int, height: int, trouble: str = "") -> RenderableType:
    """Return the live view for a terminal of this size; `trouble` says why it is out of date."""
    from rich.console import Group
    from rich.text import Text

    room = max(1, height - _AROUND - max(0, len(document.devices) - 1))
    parts: list[RenderableType] = [_summary(document), Text("")]
    if document.models:
        parts.append(models_table(document, width, room))
    else:
        parts.append(Text("no models yet"))
    hidden = len(_rows(document)) - room
    if hidden > 0:
        parts.append(Text(f"and {hidden} more with fewer requests"))
    parts += [Text(""), Text(clean(trouble), style="bold") if trouble else Text("q ends", style="dim")]
    return Group(*parts)


def models_table(document: Metrics, width: int, room: int) -> Table:
    """Return a table of the first `room` rows in `width` columns; if narrow, it shows fewer figures."""
    columns: list[_Column] = [
        (">req/s", lambda model: f"{model.recent.per_second:.1f}"),
        (">p50 ms", _latency(lambda spans: spans.p50)),
        (">p99 ms", _latency(lambda spans: spans.p99)),
    ]
    if width >= _NARROW:
        columns.insert(2, (">p95 ms", _latency(lambda spans: spans.p95)))
        columns.append((">queue", lambda model: str(model.waiting)))
    if width >= _WIDE:
        columns += [
            (">served", lambda model: str(model.served)),
            (">failed", lambda model: str(sum(model.failures.values()))),
            (">version", lambda model: str(model.version)),
            ("state", lambda model: model.state.lower()),
        ]
    if width >= _NARROW:
        columns.append(("engine", lambda model: engine_name(model.engine)))
    letters = max(_NAME, width - _COLUMN * len(columns))
    return table(
        ("model", *(heading for heading, _ in columns)),
        [
            (short(name, letters), *(cell(model) for _, cell in columns))
            for name, model in _rows(document)[:room]
        ],
    )


def _rows(document: Metrics) -> list[tuple[str, ModelFigures]]:
    """Return the models, the busiest first, each followed by its compiled shape variants."""
    rows: list[tuple[str, ModelFigures]] = []
    for model in _busiest(document.models):
        rows.append((model.name, model))
        own = [each for each in document.variants if each.name.startswith(f"{model.name}@")]
        rows += [(f"  @{each.name.partition('@')[2]}", each) for each in _busiest(own)]
    return rows


def _busiest(figures: Iterable[ModelFigures]) -> list[ModelFigures]:
    return sorted(figures, key=lambda each: (-each.recent.per_second, -each.requests, each.name))


def _latency(quantile: Callable[[DurationSummary], float | None]) -> Callable[[ModelFigures], str]:
    """Return a function that makes the cell of a latency.

    The latency is that of the last minute, or of all time if that minute had no request.
    """

    def cell(figures: ModelFigures) -> str:
        recent = figures.recent.latency
        return _milliseconds(quantile(recent if recent.count else figures.latency))

    return cell


def _summary(document: Metrics) -> Table:
    device, worker, queue, whole = document.device, document.worker, document.queue, document.whole
    restarts = max(0, worker.starts - 1)
    reason = f" ({worker.reason})" if worker.reason else ""
    latency = whole.recent.latency
    pairs = [
        (
            "service",
            f"{document.version}, up {seconds_text(document.uptime_seconds)}, "
            f"{document.connections} connections",
        ),
        (
            "device",
            f"{device.name if device else 'none yet'}, worker {worker.state}{reason}"
            + (f", restarted {restarts} times" if restarts else ""),
        ),
        (
            "requests",
            f"{whole.recent.per_second:.1f} a second, p99 {_milliseconds(latency.p99)} ms; "
            f"{queue.waiting} waiting, at most {queue.longest}; {whole.served} served, "
            f"{sum(whole.failures.values())} failed, {whole.retries} run again",
        ),
    ]
    pairs += [
        ("", f"{each.shown}, worker {each.worker.state}, {each.queue.waiting} waiting")
        for each in document.devices[1:]
    ]
    if document.temperatures:
        sensors = sorted(document.temperatures.items(), key=lambda each: -each[1])
        pairs.append(("hottest", ", ".join(f"{name} {celsius:.0f} °C" for name, celsius in sensors[:3])))
    lease = document.lease
    held = "held by a tuner" if lease.held else "free"
    pairs.append(("lease", f"{held}; {seconds_text(lease.seconds)} in {lease.grants} grants so far"))
    pairs.append(("tuning", _tuning_text(document.tuning)))
    faults = document.gpu_faults.counts
    if sum(faults.values()):
        others = faults["other"] + faults["unknown"]
        pairs.append(("GPU faults", f"{faults['service']} of a worker, {others} of others: 'hone faults'"))
    return fields(pairs)


def _tuning_text(tuning: TuningFigures | None) -> str:
    if tuning is None:
        return "no tuner has reported yet"
    if tuning.reason:
        return str(tuning.reason)
    best = [
        f"{model} {gain.before_seconds / gain.now_seconds:.2f} times as fast"
        for model, gain in tuning.gains.items()
        if gain.now_seconds and gain.before_seconds > gain.now_seconds
    ]
    said = f"{sum(tuning.trials.values())} trials, {tuning.faults} candidates in quarantine"
    return f"{said}; estimated {', '.join(best[:3])}" if best else said


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
