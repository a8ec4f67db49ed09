"""Draws from a function's space of schedules, with the features that cost models judge them by."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from honed.runtime.profile import DeviceProfile
from honed.tuner.lower.target import target_for

from . import rules, traces
from .context import tune_context
from .costmodel import Array
from .features import features

# Draws that fit no device, after which a sketch is left: 64 of a product took 2 to 4 s, for nothing.
_MOST_FAILURES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One schedule, of the sketch with that number in the space."""

    sketch: int
    trace: str  # the text that `traces.apply` makes the same schedule of
    scheduled: tirx.PrimFunc
    features: Array  # [features.WIDTH]


def draws(func: tirx.PrimFunc, profile: DeviceProfile, each: int, seed: int) -> list[Draw]:
    """About `each` different schedules of every sketch of the function's space; the same for one seed."""
    found: list[Draw] = []
    for number, sketch in enumerate(rules.space(func, target_for(profile), profile)):
        found += _of_sketch(func, profile, number, sketch, each, seed)
    return found


def features_of(scheduled: tirx.PrimFunc, profile: DeviceProfile) -> Array:
    """Features [features.WIDTH] of a function that something else scheduled."""
    module = traces.as_module(scheduled)
    strategy = ms.search_strategy.ReplayTrace()
    context = tune_context(module, target_for(profile), _generator(profile), strategy, seed=0, threads=1)
    found: Array = features(context, [ms.MeasureCandidate(Schedule(module), [])])[0]
    return found


def _generator(profile: DeviceProfile) -> ms.SpaceGenerator:
    """Of nothing: sketches are given."""
    return ms.space_generator.ScheduleFn(
        lambda _schedule: None, sch_rules=[], postprocs=rules.postprocs(profile), mutator_probs={}
    )


def _of_sketch(
    func: tirx.PrimFunc, profile: DeviceProfile, number: int, sketch: Schedule, count: int, seed: int
) -> list[Draw]:
    strategy = ms.search_strategy.ReplayTrace(max_fail_count=_MOST_FAILURES)
    module, target = traces.as_module(func), target_for(profile)
    context = tune_context(module, target, _generator(profile), strategy, seed=seed, threads=1)
    database, random = ms.database.MemoryDatabase(), ms.cost_model.RandomModel()
    context.pre_tuning(count, count, [sketch], database, random)
    candidates = list(context.generate_measure_candidates() or [])
    different = list({traces.to_text(one.sch.trace): one for one in candidates}.items())
    rows = features(context, [one for _, one in different])
    return [
        Draw(number, trace, one.sch.mod["main"], row)
        for (trace, one), row in zip(different, rows, strict=True)
    ]
