"""Command profile: where the time of an inference goes, kernel by kernel."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .models import peaks_text
from .output import Output, figure_text, line, table
from .parser import add_command, count

if TYPE_CHECKING:
    from rich.console import Console


def register(commands: Any) -> None:
    """Add this command to the parser."""
    profile = add_command(
        commands,
        "profile",
        _profile,
        about="show where the time of an inference goes, kernel by kernel",
        details=(
            "Of peak is the least time that the device's measured peaks allow (of arithmetic or of memory, "
            "whichever is slower; Williams' roofline) over the time taken: 100 % cannot be made faster."
        ),
        examples="hone profile lightglue\nhone profile lightglue -n 20 --json",
    )
    profile.add_argument("model", metavar="M", help="name of the model")
    profile.add_argument(
        "-n", "--runs", metavar="N", type=count, default=5, help="inferences to take the mean of (default 5)"
    )


def _profile(arguments: argparse.Namespace, output: Output) -> int:
    from honed.runtime.client import Client

    with Client(arguments.socket) as client:
        document = client.profile(arguments.model, arguments.runs)
    output.emit(document, lambda console: _print(console, document))
    return 0


def _print(console: Console, profile: Mapping[str, Any]) -> None:
    device = profile["device"]
    line(console, f"{profile['name']} on {device['name']}, mean of {profile['runs']} inferences")
    if profile["peaks"]:
        line(console, f"measured peaks: {peaks_text(profile['peaks'])}")
    console.print()
    headings = ("kernel", ">count", ">us", ">time", ">GFLOP/s", ">GB/s", ">of peak")
    rows = [
        (
            row["name"],
            str(row["count"]),
            f"{row['us']:,.0f}",
            f"{row['share']:.1%}",
            _figure(row["gflops"]),
            _figure(row["gbs"]),
            f"{row['peak_share']:.1%}" if row["peak_share"] else "-",
        )
        for row in profile["rows"]
    ]
    console.print(table(headings, rows))
    console.print()
    whole = profile["whole_us"]
    part = f" ({profile['sum_us'] / whole:.0%})" if whole else ""
    times = f"the sum is {profile['sum_us']:,.0f} us{part} of {whole:,.0f} us for the whole"
    line(console, f"{profile['launches']} launches an inference; {times}.")


def _figure(value: float | None) -> str:
    return figure_text(value, 1) if value else "-"
