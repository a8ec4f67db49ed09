"""The mean of several profiles of one model, as plain maps (docs/protocol.md, ModelProfile)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_RATES = ("gflops", "gbs", "peak_share")


def merged(profiles: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Times are means, and rates are those of the mean times; the rest is as in the first profile."""
    count = len(profiles)
    sum_us = sum(each["sum_us"] for each in profiles) / count
    times: defaultdict[str, float] = defaultdict(float)
    for each in profiles:
        for row in each["rows"]:
            times[row["name"]] += row["us"] / count
    rows = [_with_time(row, times[row["name"]], sum_us) for row in profiles[0]["rows"]]
    return {
        **profiles[0],
        "runs": count,
        "sum_us": sum_us,
        "whole_us": sum(each["whole_us"] for each in profiles) / count,
        "rows": sorted(rows, key=lambda row: -row["us"]),
    }


def _with_time(row: dict[str, Any], us: float, sum_us: float) -> dict[str, Any]:
    faster = row["us"] / us if us else 0.0
    rates = {name: None if row[name] is None else row[name] * faster for name in _RATES}
    return {**row, **rates, "us": us, "share": us / sum_us if sum_us else 0.0}
