"""Draws from a function's space of schedules, with the features that cost models judge them by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from random import Random

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Instruction, Trace

from honed.machine.profile import DeviceProfile
from honed.tuner.lower.target import target_for

from . import rules, traces
from .costmodel import Array, features
from .outline import Outline, Row
from .traces import tune_context

_MOST_FAILURES = 8  # draws of a sketch that cannot be played, after which it is left


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One schedule, of the sketch with that number in the space."""

    sketch: int
    schedule: Schedule
    features: Array  # [features.WIDTH]

    @property
    def scheduled(self) -> tirx.PrimFunc:
        """The function."""
        return self.schedule.mod["main"]

    @property
    def trace(self) -> str:
        """The text that `traces.apply` makes the same schedule of."""
        return traces.to_text(self.schedule.trace)


def draws(func: tirx.PrimFunc, profile: DeviceProfile, each: int, seed: int) -> list[Draw]:
    """About `each` different schedules of every sketch of the function's space; the same for one seed."""
    drawing = Drawing(func, profile, seed)
    return [one for sketch in range(drawing.sketches) for one in islice(drawing.of(sketch), each)]


def features_of(scheduled: tirx.PrimFunc, profile: DeviceProfile) -> Array:
    """Features [features.WIDTH] of a function that something else scheduled."""
    module = traces.as_module(scheduled)
    found: Array = features(_context(module, profile, []), [ms.MeasureCandidate(Schedule(module), [])])[0]
    return found


def _context(module: IRModule, profile: DeviceProfile, postprocs: list[ms.Postproc]) -> ms.TuneContext:
    """Of no search; it initialises the postprocs."""
    generator = ms.space_generator.ScheduleFn(
        lambda _schedule: None, sch_rules=[], postprocs=postprocs, mutator_probs={}
    )
    strategy = ms.search_strategy.ReplayTrace()
    return tune_context(module, target_for(profile), generator, strategy, seed=1, threads=1)


class Drawing:
    """Draws from a function's space, as many from each sketch as are asked for; the same for one seed."""

    def __init__(self, func: tirx.PrimFunc, profile: DeviceProfile, seed: int) -> None:
        self._module = traces.as_module(func)
        self._budget = rules.budget(profile)
        self._postprocs = rules.completing(profile)
        self._context = _context(self._module, profile, self._postprocs)
        self._beginnings: dict[tuple[Instruction, ...], Schedule] = {}
        self._space = rules.space(func, target_for(profile), profile)
        self._outlines: dict[int, Outline] = {}
        self._draws = [self._from(number, seed) for number in range(len(self._space))]

    @property
    def sketches(self) -> int:
        """How many the space has."""
        return len(self._draws)

    def that_take(self, step: str, times: int = 1) -> list[int]:
        """The numbers of the sketches that take a step of that kind so many times at least."""
        return [
            number
            for number, sketch in enumerate(self._space)
            if sum(str(inst.kind.name) == step for inst in sketch.trace.insts) >= times
        ]

    def tabled(self, sketch: int) -> list[Row]:
        """What tables have for a sketch."""
        return self._outline(sketch).tabled

    def played(self, row: Row) -> tirx.PrimFunc | None:
        """The function with a table's numbers; None where they do not fit."""
        schedule = self._begun(row.beginning).copy()
        return schedule.mod["main"] if self._played(row.rest, schedule) else None

    def of(self, sketch: int) -> Iterator[Draw]:
        """Those of a sketch that were not taken yet, each different; ends where there are no more."""
        return self._draws[sketch]

    def _outline(self, sketch: int) -> Outline:
        if sketch not in self._outlines:
            self._outlines[sketch] = Outline(self._space[sketch], self._budget)
        return self._outlines[sketch]

    def _from(self, sketch: int, seed: int) -> Iterator[Draw]:
        outline = self._outline(sketch)
        begun, failures = self._begun(outline.beginning), 0
        for rest in chain((row.rest for row in outline.tabled), outline.draws(Random(seed))):
            schedule = begun.copy()
            if self._played(rest, schedule):
                (row,) = features(self._context, [ms.MeasureCandidate(schedule, [])])
                yield Draw(sketch, schedule, row)
                continue
            failures += 1
            if failures == _MOST_FAILURES:
                return

    def _begun(self, insts: tuple[Instruction, ...]) -> Schedule:
        """A schedule with these steps taken, to be copied."""
        if insts not in self._beginnings:
            schedule = traces.unscheduled(self._module)
            Trace(insts, {}).apply_to_schedule(schedule, remove_postproc=True)
            self._beginnings[insts] = schedule
        return self._beginnings[insts]

    def _played(self, rest: Trace, schedule: Schedule) -> bool:
        """Whether the rest of a trace, and what completes it, could be applied."""
        try:
            rest.apply_to_schedule(schedule, remove_postproc=True)
            schedule.enter_postproc()
            return self._budget.apply(schedule) and all(one.apply(schedule) for one in self._postprocs)
        except (ScheduleError, ValueError, RuntimeError, TypeError):
            return False  # TVM simplifies some indices so that a later step does not know the block
