"""Evolutionary search over a task's sketches: MetaSchedule's, driven from our own loop.

The strategy keeps a population of traces, mutates the numbers in them and ranks them by the cost model; what
it proposes is compiled and measured elsewhere, and comes back through `know`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from honed.tuner.lower.opencl import LoweringFailed

from . import decisions, traces
from .context import tune_context
from .costmodel import Array, CostModel
from .features import features

POPULATION = 48
_GENERATIONS = 1
_SETTLES = 3  # plays at most until extents that depend on other decisions are known
_PLAIN_STEPS = 30  # of a trace for a dense product on a CPU


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A schedule worth measuring. `traces.apply` turns the trace into the same schedule."""

    id: str  # `traces.identity` of the trace
    trace: str
    scheduled: tirx.PrimFunc
    features: Array  # [WIDTH]
    score: float | None  # predicted; None while the cost model is untrained


class Evolution:
    """The search for one task. Not for several threads."""

    def __init__(
        self,
        func: tirx.PrimFunc,
        target: Target,
        space: Sequence[Schedule],
        model: CostModel,
        *,
        batch: int,
        seed: int,
        threads: int = 1,
        postprocs: Sequence[ms.Postproc] = (),
    ) -> None:
        """`space` and `postprocs` are those of `rules`; `batch` is how many `propose` gives at most."""
        self._module = traces.as_module(func)
        self._model = model
        self._target = target
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._module)
        self._proposed: set[str] = set()
        self._random = np.random.default_rng(seed)
        self.sketches = [traces.to_text(one.trace.simplified(remove_postproc=True)) for one in space]
        self._postprocs = list(postprocs)  # the context initialises them
        generator = ms.space_generator.ScheduleFn(
            lambda _schedule: None, sch_rules=[], postprocs=self._postprocs, mutator_probs=_mutators()
        )
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=_population(space),
            init_measured_ratio=0.25,
            init_min_unmeasured=8,
            genetic_num_iters=_GENERATIONS,
            genetic_mutate_prob=0.85,
            eps_greedy=0.15,
        )
        self._context = tune_context(
            self._module, target, generator, strategy, seed=seed % (2**31 - 2) + 1, threads=threads
        )
        self._context.pre_tuning(1 << 20, batch, list(space), self._database, _Adapter(self))

    def know(self, trace: str, seconds: float) -> None:
        """Tell of a schedule measured before: it is not proposed again, and its kin are bred from it."""
        self._proposed.add(traces.identity(trace))
        if not np.isfinite(seconds):
            return
        schedule = traces.apply(trace, self._module["main"])
        self._commit(schedule, seconds)

    def propose(self) -> list[Proposal]:
        """Up to a batch of schedules not proposed before; none where nothing new was found."""
        return self._proposals(
            [candidate.sch for candidate in self._context.generate_measure_candidates() or []]
        )

    def make(self, wanted: Iterable[decisions.Drawn]) -> list[Proposal]:
        """What is wanted, as far as it fits the function and the device and was not proposed before."""
        played = [schedule for one in wanted if (schedule := self._played(one)) is not None]
        return self._proposals(played)

    def forget(self, proposal: Proposal) -> None:
        """A proposal was not measured after all, and may be made again."""
        self._proposed.discard(proposal.id)

    def _played(self, wanted: decisions.Drawn) -> Schedule | None:
        """The schedule with the wanted decisions, ready to be lowered; None where it cannot be had."""
        with suppress(LoweringFailed, ValueError, RuntimeError):
            schedule = self._settled(wanted)
            schedule.enter_postproc()
            if all(postproc.apply(schedule) for postproc in self._postprocs):
                return schedule
        return None

    def _settled(self, wanted: decisions.Drawn) -> Schedule:
        """Play the wanted decisions, fitted to the extents that they themselves lead to further down."""
        settled = wanted
        for _ in range(_SETTLES):
            schedule = traces.apply(settled.text(), self._module["main"])
            played = decisions.read(traces.to_text(schedule.trace))
            again = decisions.adapt(wanted, played)
            if again is None or again.decisions == played.decisions:
                break
            settled = again
        return schedule

    def _proposals(self, schedules: Sequence[Schedule]) -> list[Proposal]:
        new: dict[str, tuple[str, Schedule]] = {}
        for schedule in schedules:
            trace = traces.to_text(schedule.trace)
            key = traces.identity(trace)
            if key not in self._proposed:
                new[key] = trace, schedule
        self._proposed.update(new)
        features = self.features([ms.MeasureCandidate(schedule, []) for _, schedule in new.values()])
        scores = self._model.predict(features) if new else None
        return [
            Proposal(
                key, trace, schedule.mod["main"], features[n], None if scores is None else float(scores[n])
            )
            for n, (key, (trace, schedule)) in enumerate(new.items())
        ]

    def features(self, candidates: Sequence[Any]) -> Array:
        """Features [n, WIDTH] of schedules."""
        return features(self._context, candidates)

    def predict(self, candidates: Sequence[Any]) -> NDArray[np.float64]:
        """Scores [n]; random while the cost model is untrained."""
        scores = self._model.predict(self.features(candidates)) if self._model.trained else None
        if scores is None:
            return self._random.random(len(candidates))
        return scores.astype(np.float64)

    def _commit(self, schedule: Schedule, seconds: float) -> None:
        record = ms.database.TuningRecord(schedule.trace, self._workload, [seconds], self._target, None)
        self._database.commit_tuning_record(record)


def _population(space: Sequence[Schedule]) -> int:
    """Fewer where each schedule takes longer to play and to look at: those of convolutions do."""
    steps = max(len(schedule.trace.insts) for schedule in space)
    return max(POPULATION // 3, min(POPULATION, POPULATION * _PLAIN_STEPS // steps))


def _mutators() -> dict[ms.Mutator, float]:
    return {
        ms.mutator.MutateTileSize(): 0.8,
        ms.mutator.MutateUnroll(): 0.1,
        ms.mutator.MutateThreadBinding(): 0.1,
    }


@derived_object
class _Adapter(ms.cost_model.PyCostModel):  # type: ignore[misc]
    """The cost model as the strategy asks for it."""

    def __init__(self, evolution: Evolution) -> None:
        super().__init__()
        self.evolution = evolution

    def load(self, path: str) -> None:
        """Not used: the model is kept by its owner."""

    def save(self, path: str) -> None:
        """Not used: the model is kept by its owner."""

    def update(self, context: Any, candidates: Any, results: Any) -> None:
        """Not used: the model learns from verdicts, not from runner results."""

    def predict(self, context: Any, candidates: Any) -> NDArray[np.float64]:
        """Scores for the strategy's ranking."""
        return self.evolution.predict(list(candidates))
