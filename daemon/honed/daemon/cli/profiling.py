"""Command profile: where the time of an inference goes, kernel by kernel."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .models import peaks_text
from .output import Output, line, table
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
            "A kernel's share of the peak is the least time the device's measured peaks allow, over the time "
            "it took: 100 % cannot be made faster on this device."
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
        document = analyse(client.profile(arguments.model, arguments.runs))
    output.emit(document, lambda console: _print(console, document))
    return 0


def analyse(profile: Mapping[str, Any]) -> dict[str, Any]:
    """A ModelProfile's result with rates and shares: rows by falling time, and their sum.

    Adds to each row share (of the sum), gflops (GFLOP/s), gbs (GB/s) and peak_share, None where the work
    or the peaks are not known; to the whole sum_us and sum_share (sum over whole).
    """
    peaks = profile["peaks"]
    total = sum(row["us"] for row in profile["rows"])
    rows = [{**row, **_rates(row, total, peaks)} for row in profile["rows"]]
    rows.sort(key=lambda row: -row["us"])
    whole = profile["whole_us"]
    return {**profile, "rows": rows, "sum_us": total, "sum_share": total / whole if whole else None}


def _rates(row: Mapping[str, Any], total: float, peaks: Mapping[str, Any] | None) -> dict[str, float | None]:
    us, flops, moved = row["us"], row["flops"], row["bytes"]
    share = us / total if total else 0.0
    if not us or row["kind"] != "kernel":
        return {"share": share, "gflops": None, "gbs": None, "peak_share": None}
    least_us = _least_us(row, peaks)
    return {
        "share": share,
        "gflops": flops / us * 1e-3 if flops else None,
        "gbs": moved / us * 1e-3 if moved else None,
        "peak_share": least_us / us if least_us else None,
    }


def _least_us(row: Mapping[str, Any], peaks: Mapping[str, Any] | None) -> float:
    """The roofline (Williams et al. 2009): arithmetic and memory traffic overlap at best completely."""
    if peaks is None:
        return 0.0
    gflops = (peaks.get("fp16_gflops") if row["fp16"] else None) or peaks["fp32_gflops"]
    return float(max(row["flops"] / gflops, row["bytes"] / peaks["bandwidth_gbs"])) * 1e-3


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
            f"{row['peak_share']:.0%}" if row["peak_share"] is not None else "-",
        )
        for row in profile["rows"]
    ]
    console.print(table(headings, rows))
    console.print()
    part = f" ({profile['sum_share']:.0%})" if profile["sum_share"] is not None else ""
    steps = sum(row["count"] for row in profile["rows"])
    line(
        console,
        f"sum {profile['sum_us']:,.0f} us of {profile['whole_us']:,.0f} us{part}, {steps} steps an inference",
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
