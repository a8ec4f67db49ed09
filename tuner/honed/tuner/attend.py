"""Which attentions are one kernel: where a roofline of the family expects it to take less time than three.

A kernel that keeps the scores of its rows saves two launches, and scores that are written and read twice. It
pays with operands that are read again for each tile of rows, and, where there are few tiles, with compute
units that have none. The figures are the family's and not those measured of a device, which rise as kernels
are measured: a model's functions, and so the records of its tuning, would change with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx

from honed.runtime.families import UnitFigures
from honed.runtime.profile import DeviceProfile

from .lower.cost import function_bytes, function_flops
from .lower.joining import Joins
from .lower.schedule import narrow_indices
from .search import rules, traces
from .search.attention import Attention, attention_of
from .search.budget import launches_of
from .search.decisions import read
from .search.starts import starts

_LOCAL = 0.75  # of the local memory is for scores: the rest holds what is made of whole rows
_LESS = 0.95  # of the time that the parts take: no figure is more exact


def attentions(profile: DeviceProfile) -> Joins:
    """Whether parts of an attention are better one function on a device; see `join_attentions`."""

    def joins(parts: Sequence[tirx.PrimFunc], joined: tirx.PrimFunc) -> bool:
        figures = profile.family.joined
        if figures is None:
            return False
        together = _seconds_joined(joined, profile, figures)
        apart = sum(_seconds(part, profile, figures) for part in parts)
        return together is not None and together < _LESS * apart

    return joins


def _seconds(func: tirx.PrimFunc, profile: DeviceProfile, figures: UnitFigures) -> float:
    """Of a function that keeps all compute units busy."""
    return _roofline(function_flops(func), function_bytes(func), profile.limits.compute_units, figures)


def _seconds_joined(func: tirx.PrimFunc, profile: DeviceProfile, figures: UnitFigures) -> float | None:
    """Of an attention as it is first served; None where it is none, or its rows do not fit."""
    func = narrow_indices(func)
    one = attention_of(func)
    groups = _groups(func, profile) if one is not None else None
    if one is None or groups is None:
        return None
    scores = one.rows_in_all // groups * one.keys * one.element_bytes
    if scores > _LOCAL * profile.limits.local_mem_bytes:
        return None
    units = profile.limits.compute_units
    busy = groups / math.ceil(groups / units)  # compute units, on average
    return _roofline(function_flops(func), function_bytes(func) + groups * _again(one), busy, figures)


def _groups(func: tirx.PrimFunc, profile: DeviceProfile) -> int | None:
    """Work-groups of the schedule that is first served; None where there is none."""
    budget = rules.budget(profile)
    for sketch in rules.attention_space(func, profile):
        for tile in starts([read(traces.to_text(sketch.trace))]):
            schedule = traces.apply(tile.text(), func)
            if budget.apply(schedule):
                return launches_of(schedule.mod["main"])[0][1]  # its blocks share one launch
    return None


def _again(one: Attention) -> int:
    """Bytes of keys and values that each tile of rows reads."""
    return one.keys * (one.inner + one.columns) * one.element_bytes


def _roofline(flops: float, nbytes: float, units: float, figures: UnitFigures) -> float:
    rate = max(flops / (figures.gflops * 1e9), nbytes / (figures.gbs * 1e9)) / units
    return rate + figures.launch_us * 1e-6
