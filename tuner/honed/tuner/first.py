"""What serves a function first: the best of many draws by the family's prior, else a default rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx
from tvm.target import Target

from honed.runtime.profile import DeviceProfile

from .lower.cost import function_bytes, function_flops
from .lower.opencl import Lowered, LoweringFailed, lower_function
from .lower.schedule import by_rule, default_kernels, narrow_indices
from .search.costmodel import Array
from .search.draw import draws, features_of
from .search.prior import Prior, prior_of

_EACH = 4  # draws from each sketch: with 2 to 8 sketches, a dozen or two
_TRIED = 4  # of the best by the prior, until one can be lowered
_SEED = 1
# What takes about as long as its launch, whatever its schedule: a rule does for it.
_SMALL_FLOPS, _SMALL_BYTES = 1 << 17, 1 << 16


def first_kernels(
    func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile
) -> tuple[str, Lowered, list[str]]:
    """The kernels that need no trial: where they come from, themselves, and why others were passed over.

    The same for the same function and profile. Raises LoweringFailed as `default_kernels` does.
    """
    passed_over: list[str] = []
    prior = prior_of(profile.rules.family)
    if prior is not None and not _small(func):
        found = [(one.scheduled, one.features) for one in draws(narrow_indices(func), profile, _EACH, _SEED)]
        ruled = by_rule(func, target, profile) if prior.knows_rules else None
        if ruled is not None:
            found.append((ruled[1], features_of(ruled[1], profile)))
        for scheduled in _best_first(found, prior)[:_TRIED]:
            if ruled is not None and scheduled is ruled[1]:
                break
            try:
                lowered = lower_function(scheduled, name, target, profile)
            except LoweringFailed as failed:
                passed_over.append(f"{prior.name}: {failed}")
                continue
            return prior.name, lowered, passed_over
    rule, lowered, more = default_kernels(func, name, target, profile)
    return rule, lowered, [*passed_over, *more]


def _best_first(found: Sequence[tuple[tirx.PrimFunc, Array]], prior: Prior) -> list[tirx.PrimFunc]:
    if not found:
        return []
    scores = prior.predict(np.array([features for _, features in found]))
    return [found[n][0] for n in np.argsort(-scores, kind="stable")]


def _small(func: tirx.PrimFunc) -> bool:
    return function_flops(func) < _SMALL_FLOPS and function_bytes(func) < _SMALL_BYTES
