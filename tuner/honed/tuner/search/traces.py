"""Stores traces of schedules as JSON text, plays them, and changes the decisions in them.

A decision is a number drawn in a schedule, as the size of a tile; the steps of the trace stay. The best
numbers for one function are adapted to another of its kind, to the nearest that its extents allow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from honed.tuner.lower.opencl import LoweringFailed, last_line
from honed.tuner.lower.schedule import fresh

_log = logging.getLogger(__name__)
_POSTPROCESSING = "EnterPostproc"  # Later steps were added to the draw, and are added to the next one again
# Steps that look blocks up or inline them: their number depends on what is fused around the main block.
_AROUND = frozenset({"GetSBlock", "GetChildBlocks", "GetConsumers", "GetProducers", "GetLoops"}) | {
    "ComputeInline",
    "ReverseComputeInline",
}


def to_text(trace: Trace) -> str:
    """Return the trace as compact JSON."""
    return json.dumps(trace.as_json(), separators=(",", ":"), default=attrgetter("value"))


def identity(text: str) -> str:
    """Return the SHA-256 of a trace's text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def steps(trace: Trace) -> str:
    """Return the steps of a trace as text, without the numbers drawn in it; JSON takes 15 times as long."""
    return str(Trace(trace.insts, {}))


def apply(trace: str | Trace, func: tirx.PrimFunc) -> Schedule:
    """Apply a trace, or its text, and return the schedule; raise LoweringFailed where it does not fit."""
    schedule = new_schedule(as_module(func))
    try:
        if isinstance(trace, Trace):
            trace.apply_to_schedule(schedule, remove_postproc=False)
        else:
            Trace.apply_json_to_schedule(json.loads(trace), schedule)
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        raise LoweringFailed(f"the recorded schedule does not fit: {last_line(error)}") from error
    return schedule


@lru_cache(maxsize=1)  # Consecutive requests for one function all begin with its copy
def as_module(func: tirx.PrimFunc) -> IRModule:
    """Return a module of a copy of the function, for its schedules and searches, which do not change it."""
    return IRModule({"main": fresh(func).with_attr("global_symbol", "main")})


def new_schedule(module: IRModule) -> Schedule:
    """Return a schedule of a module that the caller keeps: shared parts are never changed in place.

    Samples taken in it are the same every time. Errors are not rendered, as that prints the whole function.
    """
    return again(_begin(module))


@lru_cache(maxsize=1)  # Making one takes thirty times as long as copying it
def _begin(module: IRModule) -> Schedule:
    return Schedule(module, seed=1, debug_mask="none", error_render_level="none")


def again(schedule: Schedule) -> Schedule:
    """Return a copy of a schedule that takes the samples of `new_schedule`."""
    made = schedule.copy()
    made.seed(1)
    return made


def tune_context(
    module: IRModule,
    target: Target,
    generator: ms.SpaceGenerator,
    strategy: ms.SearchStrategy,
    *,
    seed: int,
    threads: int,
) -> ms.TuneContext:
    """Return what `ms.TuneContext(...)` returns, without its slow constructor.

    That constructor first imports every tensor intrinsic of TVM: 500 functions for other devices, parsed one
    by one, which takes 14 s on two cores of a Xeon. None of the rules here uses any of them.
    """
    made: Any = ms.TuneContext.__new__(ms.TuneContext)
    made.__init_handle_by_constructor__(
        _ffi_api.TuneContext,
        module,
        target,
        generator,
        strategy,
        "main",
        threads,
        seed,
        get_logging_func(_log),
    )
    _ffi_api.TuneContextInitialize(made)
    return made


@dataclass(frozen=True, slots=True)
class Tile:
    """A loop's extent as a product of factors, the outermost first."""

    factors: tuple[int, ...]
    most: int  # Limit of the innermost factor

    @property
    def extent(self) -> int:
        """Extent of the loop."""
        return math.prod(self.factors)

    def cut(self, inner: int, extent: int | None = None) -> Tile:
        """Return a tile of two factors of the extent, or of the one given; `inner` is the innermost."""
        return Tile(((extent or self.extent) // inner, inner), self.most)


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice among several options, by its index."""

    index: int
    options: int

    @property
    def last(self) -> Choice:
        """The last option, which is the largest length or number of steps."""
        return Choice(self.options - 1, self.options)


Decision = Tile | Choice


@dataclass(frozen=True, slots=True)
class ScheduleTrace:
    """A schedule's steps, and the decisions in them by the place of the step that made each."""

    steps: tuple[Any, ...]
    decisions: Mapping[int, Decision]

    @property
    def form(self) -> tuple[tuple[str, int], ...]:
        """The common form of schedules of one kind of function, whatever its sizes and what is inlined.

        It consists of the names of the steps, with the number of factors of each tile.
        """
        return tuple(
            (name, self._parts(n))
            for n, step in enumerate(self.steps)
            if (name := str(step[0])) not in _AROUND
        )

    @property
    def names(self) -> list[str]:
        """Names of the steps."""
        return [str(step[0]) for step in self.steps]

    @property
    def by_groups(self) -> bool:
        """Return whether work-groups have several work-items."""
        return "threadIdx" in str(self.steps)

    @property
    def splits(self) -> list[int]:
        """The fixed factors of splits, in order."""
        splits = (step[1][1:] for step in self.steps if step[0] == "Split")
        return [factor for factors in splits for factor in factors if isinstance(factor, int)]

    def splits_by(self, place: int) -> int:
        """Return how many loops are split by the innermost factor that the step at a place samples."""
        *_, name = self.steps[place][3]
        return sum(step[0] == "Split" and name in step[1] for step in self.steps)

    @property
    def lanes(self) -> int:
        """Lanes of a vector: the first fixed factor of a split."""
        return self.splits[0]

    @property
    def tiles(self) -> list[tuple[int, Tile]]:
        """The tiles, in order, with the places of their steps."""
        return [(place, d) for place, d in sorted(self.decisions.items()) if isinstance(d, Tile)]

    @property
    def choices(self) -> list[tuple[int, Choice]]:
        """The choices, in order, with the places of their steps."""
        return [(place, d) for place, d in sorted(self.decisions.items()) if isinstance(d, Choice)]

    def with_most(self, changed: Mapping[int, Decision]) -> ScheduleTrace:
        """Return `with_decisions`, and the last option of each other choice: longest vectors, most steps."""
        return self.with_decisions({place: choice.last for place, choice in self.choices} | dict(changed))

    def cut(self, steps: Sequence[int]) -> dict[int, Decision]:
        """Return decisions that give the first tiles these numbers of innermost steps, one for each tile."""
        return {place: tile.cut(inner) for (place, tile), inner in zip(self.tiles, steps, strict=False)}

    def with_decisions(self, changed: Mapping[int, Decision]) -> ScheduleTrace:
        """Return the trace with the same steps and some decisions changed."""
        return replace(self, decisions=MappingProxyType({**self.decisions, **changed}))

    def text(self) -> str:
        """Return the trace as text that `apply` plays."""
        made = [
            [n, list(decision.factors) if isinstance(decision, Tile) else decision.index]
            for n, decision in sorted(self.decisions.items())
        ]
        return json.dumps([self.steps, made], separators=(",", ":"))

    def _parts(self, place: int) -> int:
        decision = self.decisions.get(place)
        return len(decision.factors) if isinstance(decision, Tile) else 0


def read(text: str) -> ScheduleTrace:
    """Parse a trace of `to_text`, without what was added after the draw.

    Raises ValueError for text that is no trace. Decisions of other kinds than tiles and choices are drawn
    again when it is played.
    """
    try:
        steps, made = json.loads(text)
        names = [str(step[0]) for step in steps]
        end = names.index(_POSTPROCESSING) if _POSTPROCESSING in names else len(names)
        found = {int(n): _decision(steps[n], decision) for n, decision in made if n < end}
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"this is no trace of a schedule: {text[:60]}") from error
    decisions = {n: decision for n, decision in found.items() if decision is not None}
    return ScheduleTrace(tuple(steps[:end]), MappingProxyType(decisions))


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors in ascending order, without those above `most`."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = small + [number // d for d in reversed(small) if d * d != number]
    return found if most is None else [d for d in found if d <= most]


def nearest(factors: Sequence[int], extent: int, most: int) -> tuple[int, ...]:
    """Return factors of `extent` as near to `factors` as its divisors allow.

    The innermost is at most `most`. Nearness is measured by logarithms. The outermost takes the quotient: a
    larger function gets more tiles, not larger ones.
    """
    left, found = extent, list[int]()
    for place, wanted in reversed(list(enumerate(factors))[1:]):
        innermost = place == len(factors) - 1
        allowed = divisors(left, most if innermost else None)
        factor = min(allowed, key=lambda d: (abs(math.log(d / wanted)), d))
        found.append(factor)
        left //= factor
    return (left, *reversed(found))


def adapt(related: ScheduleTrace, to: ScheduleTrace) -> ScheduleTrace | None:
    """Transfer the decisions of `related` to the steps of `to`; None where the two differ in form."""
    if related.form != to.form or len(related.decisions) != len(to.decisions):
        return None
    pairs = zip(sorted(related.decisions.items()), sorted(to.decisions.items()), strict=True)
    changed: dict[int, Decision] = {}
    for (_, theirs), (place, ours) in pairs:
        if isinstance(theirs, Tile) and isinstance(ours, Tile):
            changed[place] = Tile(nearest(theirs.factors, ours.extent, ours.most), ours.most)
        elif isinstance(theirs, Choice) and isinstance(ours, Choice):
            changed[place] = Choice(min(theirs.index, ours.options - 1), ours.options)
        else:
            return None
    return to.with_decisions(changed)


def _decision(step: Any, decision: Any) -> Decision | None:
    name, _, attributes, _ = step
    if name == "SamplePerfectTile":
        factors = tuple(int(factor) for factor in decision)
        most = int(attributes[1])
        return Tile(factors, most if most > 0 else math.prod(factors))
    if name == "SampleCategorical":
        return Choice(int(decision), len(attributes[0]))
    return None
