"""Schedules of a task as OpenCL C with their launches: the default one, and draws from its space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx

from honed.machine.profile import DeviceProfile
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import default_kernels, narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search import draw


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A draw with its kernels."""

    draw: draw.ScheduleSample
    lowered: Lowered


def default(func: tirx.PrimFunc, profile: DeviceProfile) -> tuple[str, Lowered]:
    """Return the default schedule's rule and kernels."""
    rule, lowered, _ = default_kernels(func, "main", target_for(profile), profile)
    return rule, lowered


def draws(func: tirx.PrimFunc, profile: DeviceProfile, count: int, seed: int = 1) -> Iterator[Drawn]:
    """Yield about `count` schedules from each sketch of the function's space, fewer if some do not lower."""
    target = target_for(profile)
    for one in draw.draws(narrow_indices(func), profile, count, seed):
        try:
            yield Drawn(one, lower_function(one.scheduled, "main", target, profile))
        except LoweringFailed:
            continue
