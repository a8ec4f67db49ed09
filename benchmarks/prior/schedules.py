"""What a prior chooses from: the default rule's schedule of a function, and draws from its space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from tvm import tirx

from benchmarks.valhall.draws import draws
from honed.runtime.profile import DeviceProfile
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import by_rule
from honed.tuner.lower.target import target_for
from honed.tuner.search.costmodel import Array
from honed.tuner.search.draw import features_of

_EACH = 6  # draws from each sketch


def schedules(func: tirx.PrimFunc, profile: DeviceProfile, seed: int) -> Iterator[tuple[Array, Lowered]]:
    """Features and kernels of each that can be lowered, the rule's first; the same for one seed."""
    target = target_for(profile)
    ruled = by_rule(func, target, profile)
    if ruled is not None:
        with suppress(LoweringFailed):
            yield features_of(ruled[1], profile), lower_function(ruled[1], "main", target, profile)
    for one in draws(func, profile, _EACH, seed):
        yield one.draw.features, one.lowered
