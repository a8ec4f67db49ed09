"""Chooses the next batches of a task: from related tasks, from tables, then evolution and descent in turn.

Related tasks are functions of one kind at other sizes, in this model or in others: the best schedule of one
is tried first for the other. Evolution is MetaSchedule's, driven from our own loop: it keeps a population of
traces, mutates the numbers in them and ranks them by the cost model. Descent is by coordinates, in schedules
that differ from the best in a single decision, like TVM's Droplet search; here neighbours go through the same
checks and measurements as all other candidates. Proposals are compiled and measured elsewhere, and results
arrive through `know`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from honed.machine.families import DriverClass
from honed.runtime.compiled.model import SearchStrategy
from honed.tuner.lower.opencl import LoweringFailed

from . import traces
from .costmodel import Array, CostModel, features
from .sketches import starts
from .traces import Choice, Decision, ScheduleTrace, Tile, adapt, divisors, read, tune_context

EVOLVED_FIRST = 2  # Batches of evolution before the best are worth descending from
_CENTRES = 4  # Best schedules to descend from, each once all neighbours of the better ones were tried
POPULATION = 48
_GENERATIONS = 1
_SETTLES = 3  # Plays at most until extents that depend on other decisions are known
_PLAIN_STEPS = 30  # Steps of a trace for a dense product on a CPU


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A schedule worth measuring. `traces.apply` turns the trace into the same schedule."""

    id: str  # By `traces.identity` of the trace
    trace: str
    scheduled: tirx.PrimFunc
    features: Array  # Shape [WIDTH]
    score: float | None  # Predicted; None while the cost model is untrained


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of proposals, the most promising first."""

    way: SearchStrategy
    proposals: list[Proposal]
    last: bool  # Evolved because only the best is left to try


class Batches:
    """The batches of one task, in turn. Not for several threads."""

    def __init__(
        self,
        evolution: Evolution,
        size: int,
        related: Sequence[str] = (),
        driver: DriverClass = DriverClass.ARM,
    ) -> None:
        """Set up the batches.

        `size` is the most schedules of one, `related` are the best traces of other tasks.

        The tables are those of `driver`.
        """
        self._driver = driver
        self._evolution = evolution
        self._size = size
        self._related = list(related)
        self._started = False
        self._evolved = 0
        self._best: list[tuple[float, str]] = []  # Seconds and traces, the fastest first
        self._last: SearchStrategy | None = None
        self._before = math.inf  # The best time when the last batch was proposed

    def know(self, trace: str, seconds: float) -> None:
        """Add a measured schedule; infinite seconds: it was refused. Raises as `Evolution.know`."""
        self._evolution.know(trace, seconds)
        if math.isfinite(seconds):
            self._best = sorted({*self._best, (seconds, trace)})[:_CENTRES]

    def next(self) -> Batch:
        """Return the next batch; it has no proposals where nothing new was found."""
        fastest = self._best[0][0] if self._best else math.inf
        won, self._before = fastest < self._before, fastest
        if self._related:
            related, self._related = self._related, []
            if found := self._of_related(related):
                return self._batch(SearchStrategy.RELATED, found)
        if not self._started:
            self._started = True
            if found := self._evolution.make(starts(self._sketches(), self._driver, trial=True)):
                return self._batch(SearchStrategy.TABLES, found)
        beside = self._beside() if self._evolved >= EVOLVED_FIRST else []
        if beside and (self._last is not SearchStrategy.DESCENT or won):
            return self._batch(SearchStrategy.DESCENT, beside)
        last = self._evolved >= EVOLVED_FIRST and not beside
        for left in beside:
            self._evolution.forget(left)
        self._evolved += 1
        return self._batch(SearchStrategy.EVOLUTION, self._evolution.propose(), last=last)

    def _batch(self, way: SearchStrategy, proposals: list[Proposal], *, last: bool = False) -> Batch:
        self._last = way
        ranked = sorted(proposals, key=lambda proposal: -(proposal.score or 0.0))
        for left in ranked[self._size :]:
            self._evolution.forget(left)
        return Batch(way, ranked[: self._size], last)

    def _of_related(self, related: Sequence[str]) -> list[Proposal]:
        theirs = []
        for trace in related:
            with suppress(ValueError):
                theirs.append(read(trace))
        return self._evolution.make(adapt_all(theirs, self._sketches(), self._size))

    def _sketches(self) -> list[ScheduleTrace]:
        return [read(text) for text in self._evolution.sketches]

    def _beside(self) -> list[Proposal]:
        found: list[Proposal] = []
        for _, trace in self._best:
            found += self._evolution.make(neighbours(read(trace)))
            if len(found) >= self._size:
                break
        return found


def distance(related: ScheduleTrace, to: ScheduleTrace) -> float:
    """Return the distance of the extents of two schedules of one form: the sum of |log ratio|."""
    pairs = zip(related.tiles, to.tiles, strict=True)
    return sum(abs(math.log(theirs.extent / ours.extent)) for (_, theirs), (_, ours) in pairs)


def adapt_all(
    related: Iterable[ScheduleTrace], sketches: Sequence[ScheduleTrace], most: int
) -> list[ScheduleTrace]:
    """Return up to `most` schedules adapted from `related` to each sketch of their form, nearest first."""
    found = [
        (distance(one, sketch), made)
        for one in related
        for sketch in sketches
        if (made := adapt(one, sketch)) is not None
    ]
    found.sort(key=lambda pair: pair[0])
    return list({made.text(): made for _, made in found}.values())[:most]


def neighbours(drawn: ScheduleTrace) -> list[ScheduleTrace]:
    """Return all schedules one step away in one decision: tiles at adjacent divisors, adjacent choices."""
    return [
        drawn.with_decisions({place: other})
        for place, decision in sorted(drawn.decisions.items())
        for other in _beside(decision)
    ]


def _beside(decision: Decision) -> Iterator[Decision]:
    if isinstance(decision, Choice):
        for index in (decision.index - 1, decision.index + 1):
            if 0 <= index < decision.options:
                yield Choice(index, decision.options)
        return
    for smaller, larger in permutations(range(len(decision.factors)), 2):
        moved = _move_factor(decision, smaller, larger)
        if moved is not None:
            yield moved


def _move_factor(tile: Tile, smaller: int, larger: int) -> Tile | None:
    """Move one factor to its next larger divisor of both factors' product; the other gets the quotient."""
    together = tile.factors[smaller] * tile.factors[larger]
    following = next((d for d in divisors(together) if d > tile.factors[larger]), None)
    if following is None or (larger == len(tile.factors) - 1 and following > tile.most):
        return None
    factors = list(tile.factors)
    factors[larger], factors[smaller] = following, together // following
    return Tile(tuple(factors), tile.most)


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
        """Set up the search.

        `space` and `postprocs` are those of `rules`, `batch` is the most that `propose` returns.
        """
        self._module = traces.as_module(func)
        self._model = model
        self._target = target
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._module)
        self._proposed: set[str] = set()
        self._random = np.random.default_rng(seed)
        self.sketches = [traces.to_text(one.trace.simplified(remove_postproc=True)) for one in space]
        self._postprocs = list(postprocs)  # The context initialises them
        m = ms.mutator
        mutators = {m.MutateTileSize(): 0.8, m.MutateUnroll(): 0.1, m.MutateThreadBinding(): 0.1}
        generator = ms.space_generator.ScheduleFn(
            lambda _schedule: None, sch_rules=[], postprocs=self._postprocs, mutator_probs=mutators
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
        """Add a measured schedule: it is not proposed again, and evolution derives others from it."""
        self._proposed.add(traces.identity(trace))
        if not np.isfinite(seconds):
            return
        schedule = traces.apply(trace, self._module["main"])
        record = ms.database.TuningRecord(schedule.trace, self._workload, [seconds], self._target, None)
        self._database.commit_tuning_record(record)

    def propose(self) -> list[Proposal]:
        """Return up to a batch of schedules not proposed before; none where nothing new was found."""
        return self._proposals(
            [candidate.sch for candidate in self._context.generate_measure_candidates() or []]
        )

    def make(self, wanted: Iterable[ScheduleTrace]) -> list[Proposal]:
        """Return the wanted draws that fit the function and the device and were not proposed before."""
        played = [schedule for one in wanted if (schedule := self._play(one)) is not None]
        return self._proposals(played)

    def forget(self, proposal: Proposal) -> None:
        """Allow a proposal to be made again, because it was not measured after all."""
        self._proposed.discard(proposal.id)

    def _play(self, wanted: ScheduleTrace) -> Schedule | None:
        """Return the schedule with the wanted decisions, ready to be lowered.

        None where that is impossible.
        """
        with suppress(LoweringFailed, ValueError, RuntimeError):
            schedule = self._settle(wanted)
            schedule.enter_postproc()
            if all(postproc.apply(schedule) for postproc in self._postprocs):
                return schedule
        return None

    def _settle(self, wanted: ScheduleTrace) -> Schedule:
        """Play the wanted decisions, fitted to the extents that earlier decisions give later ones."""
        settled = wanted
        for _ in range(_SETTLES):
            schedule = traces.apply(settled.text(), self._module["main"])
            played = read(traces.to_text(schedule.trace))
            again = adapt(wanted, played)
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
        """Return features [n, WIDTH] of schedules."""
        return features(self._context, candidates)

    def predict(self, candidates: Sequence[Any]) -> NDArray[np.float64]:
        """Return scores [n]; random ones while the cost model is untrained."""
        scores = self._model.predict(self.features(candidates)) if self._model.trained else None
        if scores is None:
            return self._random.random(len(candidates))
        return scores.astype(np.float64)


def _population(space: Sequence[Schedule]) -> int:
    """Return a smaller population where schedules, as of convolutions, take longer to play and to examine."""
    steps = max(len(schedule.trace.insts) for schedule in space)
    return max(POPULATION // 3, min(POPULATION, POPULATION * _PLAIN_STEPS // steps))


@derived_object
class _Adapter(ms.cost_model.PyCostModel):  # type: ignore[misc]
    """An adapter of the cost model to the strategy's interface, as far as that asks for scores."""

    def __init__(self, evolution: Evolution) -> None:
        super().__init__()
        self.evolution = evolution

    def predict(self, context: Any, candidates: Any) -> NDArray[np.float64]:
        """Return scores for the strategy's ranking."""
        return self.evolution.predict(list(candidates))
