"""Command profile: where the time of an inference goes, kernel by kernel, or node by node."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from honed.machine.files import replacing
from honed.protocol.methods import MODEL_PROFILE, MODEL_SHOW
from honed.protocol.params import ModelParams
from honed.protocol.results import ModelProfile, ProfiledRow
from honed.runtime.client import Client
from honed.tool.output import Console, Output, figure_text, line, table
from honed.tool.parser import Parser, count, define
from honed.tool.view.trace import trace

from .models import peaks_text


def define_profile(profile: Parser) -> None:
    """What `hone profile` takes."""
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
        told = client.profile(arguments.model, arguments.runs, timeline=wanted)
        shown = client.ask(MODEL_SHOW, ModelParams(name=arguments.model)) if wanted else None
    profile = MODEL_PROFILE.result_of(told)
    if shown is not None:
        with replacing(arguments.trace) as file:
            file.write(json.dumps(trace(profile, shown), allow_nan=False).encode())
    output.emit(profile, lambda console: _print(console, profile))


def _print(console: Console, profile: ModelProfile) -> None:
    device = profile.device
    if profile.engine == "cpu":
        _print_nodes(console, profile)
        return
    line(console, f"{profile.name} on {device.name}, engine gpu, mean of {profile.runs} inferences")
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
            _figure(row.gflops),
            _figure(row.gbs),
            f"{row.peak_share:.1%}" if row.peak_share else "-",
        )
        for row in profile.rows
    ]
    console.print(table(headings, rows))
    console.print()
    line(console, f"{profile.launches} launches an inference; {_sums(profile)}.")


def _print_nodes(console: Console, profile: ModelProfile) -> None:
    """Of a model that ONNX Runtime runs: by operator, then node by node."""
    runtime = profile.device.driver_version
    line(console, f"{profile.name}, engine cpu (ONNX Runtime {runtime}), mean of {profile.runs} inferences")
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
    console.print(table(("operator", ">count", ">us", ">time"), map(_told, sorted(operators, key=_us))))
    console.print()
    console.print(table(("node", "operator", ">count", ">us", ">time"), map(_told, nodes)))
    console.print()
    line(console, f"{profile.launches} nodes an inference; {_sums(profile)}.")


def _us(row: tuple[str, int, float, float]) -> float:
    return -row[2]


def _told(row: Sequence[Any]) -> tuple[str, ...]:
    *names, count, us, share = row
    return (*names, str(count), f"{us:,.0f}", f"{share:.1%}")


def _sums(profile: ModelProfile) -> str:
    whole = profile.whole_us
    part = f" ({profile.sum_us / whole:.0%})" if whole else ""
    return f"the sum is {profile.sum_us:,.0f} us{part} of {whole:,.0f} us for the whole"


def _figure(value: float | None) -> str:
    return figure_text(value, 1) if value else "-"
