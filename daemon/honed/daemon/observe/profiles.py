"""The mean of several profiles of one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from honed.protocol.results import ModelProfile, ProfiledRow


def merged(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Times are means, and rates are those of the mean times; the rest is as in the first profile."""
    count = len(profiles)
    sum_us = sum(each.sum_us for each in profiles) / count
    times: defaultdict[str, float] = defaultdict(float)
    for each in profiles:
        for row in each.rows:
            times[row.name] += row.us / count
    rows = [_with_time(row, times[row.name], sum_us) for row in profiles[0].rows]
    return replace(
        profiles[0],
        runs=count,
        sum_us=sum_us,
        whole_us=sum(each.whole_us for each in profiles) / count,
        rows=tuple(sorted(rows, key=lambda row: -row.us)),
    )


def _with_time(row: ProfiledRow, us: float, sum_us: float) -> ProfiledRow:
    faster = row.us / us if us else 0.0
    gflops, gbs, peak_share = (
        None if rate is None else rate * faster for rate in (row.gflops, row.gbs, row.peak_share)
    )
    return replace(
        row, us=us, share=us / sum_us if sum_us else 0.0, gflops=gflops, gbs=gbs, peak_share=peak_share
    )
