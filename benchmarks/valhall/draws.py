"""Schedules of a task: the default one, and draws from its space, as OpenCL C with their launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.s_tir import meta_schedule as ms

from honed.runtime.profile import DeviceProfile
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import default_kernels, narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search import traces
from honed.tuner.search.context import tune_context
from honed.tuner.search.rules import postprocs, space


@dataclass(frozen=True, slots=True)
class Drawn:
    """One schedule; `sketch` is the number of the sketch it was drawn from, -1 for the default."""

    sketch: int
    lowered: Lowered
    trace: str


def default(func: tirx.PrimFunc, profile: DeviceProfile) -> tuple[str, Lowered]:
    """The default schedule's rule and kernels."""
    rule, lowered, _ = default_kernels(func, "main", target_for(profile), profile)
    return rule, lowered


def draws(func: tirx.PrimFunc, profile: DeviceProfile, count: int, seed: int = 1) -> Iterator[Drawn]:
    """About `count` schedules from each sketch of the function's space; fewer where they do not lower."""
    func, target = narrow_indices(func), target_for(profile)
    for number, sketch in enumerate(space(func, target, profile)):
        generator = ms.space_generator.ScheduleFn(
            lambda _schedule: None, sch_rules=[], postprocs=postprocs(profile), mutator_probs={}
        )
        strategy = ms.search_strategy.ReplayTrace(max_fail_count=64)
        context = tune_context(traces.as_module(func), target, generator, strategy, seed=seed, threads=1)
        random = ms.cost_model.RandomModel()
        context.pre_tuning(count, count, [sketch], ms.database.MemoryDatabase(), random)
        seen: set[str] = set()
        for candidate in context.generate_measure_candidates() or []:
            text = traces.to_text(candidate.sch.trace)
            if text in seen:
                continue
            seen.add(text)
            try:
                yield Drawn(number, lower_function(candidate.sch.mod["main"], "main", target, profile), text)
            except LoweringFailed:
                continue
