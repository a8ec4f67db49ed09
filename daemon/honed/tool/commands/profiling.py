"""Implements `hone profile`: where the time of an inference goes, as a table or as a trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from honed.machine.files import replacing
from honed.protocol.methods import MODEL_PROFILE, MODEL_SHOW
from honed.protocol.params import ModelParams
from honed.protocol.results import ModelShown
from honed.protocol.values import ModelProfile, ProfiledRow, ShownKernel, engine_name
from honed.runtime.client import Client
from honed.tool.output import Console, Output, figure_text, line, table
from honed.tool.parser import Parser, count, define

from .models import peaks_text

# The format is Chrome's ("Trace Event Format"): times in microseconds; X is an event with a duration, M names
# a process or a thread, s and f are the ends of an arrow.
_PROCESS, _HOST, _DEVICE = 1, 1, 2
_ROWS = {_HOST: "host", _DEVICE: "device"}
Event = dict[str, Any]  # An event, or a part of one


def trace(profile: ModelProfile, shown: ModelShown) -> Event:
    """Return the trace of a profile with a timeline (ModelProfile) of a model (ModelShow)."""
    device = profile.device
    events = [
        _metadata("process_name", _HOST, profile.name),
        *(_metadata("thread_name", row, name) for row, name in _ROWS.items()),
        *(_metadata("thread_sort_index", row, row) for row in _ROWS),
        _event("inference", "host", _HOST, (0.0, profile.whole_us), {}),
        *_commands(profile, shown),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "model": profile.name,
            "sha256": shown.sha256,
            "device": device.name,
            "driver": device.driver_version,
            "clocks": "the device's clock is set to the host's by when the first command was enqueued",
        },
    }


def _commands(profile: ModelProfile, shown: ModelShown) -> Iterator[Event]:
    rows = {row.name: row for row in profile.rows}
    kernels = {kernel.name: kernel for kernel in shown.kernels}
    for number, (name, begin, end, computed, completed) in enumerate(profile.timeline or ()):
        kind, arguments = rows[name].kind, _arguments(rows[name], kernels.get(name))
        if computed is None or completed is None:
            yield _event(name, kind, _HOST, (begin, end), arguments)
            continue
        yield _event(f"enqueue {name}", "enqueue", _HOST, (begin, end), {})
        yield _event(name, kind, _DEVICE, (computed, completed), arguments)
        arrow = {"name": "enqueue", "cat": "enqueue", "id": number, "pid": _PROCESS}
        yield {**arrow, "ph": "s", "tid": _HOST, "ts": begin}
        yield {**arrow, "ph": "f", "bp": "e", "tid": _DEVICE, "ts": max(begin, computed)}


def _arguments(row: ProfiledRow, kernel: ShownKernel | None) -> Event:
    """Return the arguments of a command's event: what is known besides its times."""
    if kernel is None:
        return {}
    result = {"task": row.task, "schedule": row.schedule, "share of peak": row.peak_share}
    geometry = {"groups": "x".join(map(str, kernel.grid)), "items": "x".join(map(str, kernel.block))}
    return result | geometry | {"operations": kernel.flops, "bytes": kernel.bytes}


def _event(name: str, kind: str, row: int, span: tuple[float, float], arguments: Event) -> Event:
    begin, end = span
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": begin,
        "dur": end - begin,
        "pid": _PROCESS,
        "tid": row,
        "args": arguments,
    }


def _metadata(kind: str, row: int, value: str | int) -> Event:
    key = "sort_index" if kind == "thread_sort_index" else "name"
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": row, "ts": 0, "args": {key: value}}


def define_profile(profile: Parser) -> None:
    """Define the arguments of `hone profile`."""
    define(
        profile,
        _profile,
        details=(
            "Of peak is the least time that the device's measured peaks allow (of arithmetic or of memory, "
            "whichever is slower; Williams' roofline) over the time taken: 100 % cannot be made faster. "
            "What the CPU engine serves is profiled by ONNX Runtime, node by node, on zeros in the shapes "
            "that were asked for last."
        ),
        examples="""\
            hone profile lightglue
            hone profile lightglue -n 20 --json
            hone profile lightglue --trace lightglue.json   # open it in ui.perfetto.dev""",
    )
    profile.add_argument("model", metavar="M", help="name of the model")
    profile.add_argument(
        "-n", "--runs", metavar="N", type=count, default=5, help="inferences to take the mean of (default 5)"
    )
    profile.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write the first inference as a trace for Perfetto (Chrome's trace event format)",
    )


def _profile(arguments: argparse.Namespace, output: Output) -> None:
    wanted = arguments.trace is not None
    with Client(arguments.socket) as client:
        result = client.profile(arguments.model, arguments.runs, timeline=wanted)
        shown = client.ask(MODEL_SHOW, ModelParams(name=arguments.model)) if wanted else None
    profile = MODEL_PROFILE.result_of(result)
    if shown is not None:
        with replacing(arguments.trace) as file:
            file.write(json.dumps(trace(profile, shown), allow_nan=False).encode())
    output.emit(profile, lambda console: _print(console, profile))


def _print(console: Console, profile: ModelProfile) -> None:
    device = profile.device
    if profile.engine == "cpu":
        _print_nodes(console, profile)
        return
    engine = engine_name(profile.engine)
    line(console, f"{profile.name} on {device.name}, engine {engine}, mean of {profile.runs} inferences")
    if profile.peaks:
        line(console, f"measured peaks: {peaks_text(profile.peaks)}")
    console.print()
    headings = ("kernel", ">count", ">us", ">time", ">GFLOP/s", ">GB/s", ">of peak")
    rows = [
        (
            row.name,
            str(row.count),
            f"{row.us:,.0f}",
            f"{row.share:.1%}",
            figure_text(row.gflops, 1) if row.gflops else "-",
            figure_text(row.gbs, 1) if row.gbs else "-",
            f"{row.peak_share:.1%}" if row.peak_share else "-",
        )
        for row in profile.rows
    ]
    console.print(table(headings, rows))
    console.print()
    line(console, f"{profile.launches} launches an inference; {_sums(profile)}.")


def _print_nodes(console: Console, profile: ModelProfile) -> None:
    """Print the profile of a model that ONNX Runtime runs: by operator, then node by node."""
    runtime = profile.device.driver_version
    by = f"engine {engine_name(profile.engine)} (ONNX Runtime {runtime})"
    line(console, f"{profile.name}, {by}, mean of {profile.runs} inferences")
    by_operator: dict[str, list[ProfiledRow]] = {}
    for row in profile.rows:
        by_operator.setdefault(row.schedule, []).append(row)
    operators = [
        (
            operator,
            sum(row.count for row in rows),
            sum(row.us for row in rows),
            sum(row.share for row in rows),
        )
        for operator, rows in by_operator.items()
    ]
    nodes = [(row.name, row.schedule, row.count, row.us, row.share) for row in profile.rows]
    console.print()
    console.print(
        table(("operator", ">count", ">us", ">time"), map(_cells, sorted(operators, key=lambda row: -row[2])))
    )
    console.print()
    console.print(table(("node", "operator", ">count", ">us", ">time"), map(_cells, nodes)))
    console.print()
    line(console, f"{profile.launches} nodes an inference; {_sums(profile)}.")


def _cells(row: Sequence[Any]) -> tuple[str, ...]:
    *names, count, us, share = row
    return (*names, str(count), f"{us:,.0f}", f"{share:.1%}")


def _sums(profile: ModelProfile) -> str:
    whole = profile.whole_us
    part = f" ({profile.sum_us / whole:.0%})" if whole else ""
    return f"the sum is {profile.sum_us:,.0f} us{part} of {whole:,.0f} us for the whole"
