"""Draws from a function's space of schedules, with the features by which cost models judge them.

Most draws of some sketches exceed the budget, and TVM takes 5 to 25 ms to play one. But all draws use a
number for the same loops of the schedule: an `Outline` reads these from the sketch once, and numbers are then
drawn until they fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, count, islice, takewhile
from random import Random

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Instruction, LoopRV, SBlockRV, Trace

from honed.machine.families import DriverClass
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.target import target_for

from . import rules, traces
from .budget import Budget, Size, launches, nests, registers
from .costmodel import Array, features
from .sketches import starts
from .traces import ScheduleTrace, read, tune_context

_TRIES = 256  # Consecutive draws that do not fit, after which a sketch is abandoned
_Values = Sequence[Sequence[int]]  # Values of each sample: the factors, or the one value chosen
_MOST_FAILURES = 8  # Draws of a sketch that cannot be played, after which it is abandoned


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleSample:
    """A schedule drawn from the space's sketch number `sketch`."""

    sketch: int
    schedule: Schedule
    features: Array  # Shape [WIDTH]

    @property
    def scheduled(self) -> tirx.PrimFunc:
        """The function with the schedule applied."""
        return self.schedule.mod["main"]

    @property
    def trace(self) -> str:
        """The text from which `traces.apply` makes an equal schedule."""
        return traces.to_text(self.schedule.trace)


def draws(func: tirx.PrimFunc, profile: DeviceProfile, each: int, seed: int) -> list[ScheduleSample]:
    """Return about `each` different schedules of every sketch of the function's space.

    The result for one seed is always equal.
    """
    drawing = SpaceSampler(func, profile, seed)
    return [one for sketch in range(drawing.sketches) for one in islice(drawing.of(sketch), each)]


def features_of(scheduled: tirx.PrimFunc, profile: DeviceProfile) -> Array:
    """Return features [WIDTH] of a function that was scheduled elsewhere."""
    module = traces.as_module(scheduled)
    found: Array = features(_context(module, profile, []), [ms.MeasureCandidate(Schedule(module), [])])[0]
    return found


def _context(module: IRModule, profile: DeviceProfile, postprocs: list[ms.Postproc]) -> ms.TuneContext:
    """Return a context without a search; it initialises the postprocs."""
    generator = ms.space_generator.ScheduleFn(
        lambda _schedule: None, sch_rules=[], postprocs=postprocs, mutator_probs={}
    )
    strategy = ms.search_strategy.ReplayTrace()
    return tune_context(module, target_for(profile), generator, strategy, seed=1, threads=1)


class SpaceSampler:
    """A sampler of a function's space, with any number of draws per sketch; deterministic by seed."""

    def __init__(self, func: tirx.PrimFunc, profile: DeviceProfile, seed: int) -> None:
        self._module = traces.as_module(func)
        self._budget, self._driver = rules.budget(profile), profile.driver
        self._postprocs = rules.completing(profile)
        self._context = _context(self._module, profile, self._postprocs)
        self._beginnings: dict[tuple[Instruction, ...], Schedule] = {}
        self._space = list[Schedule]()
        self._left = rules.each_of_space(func, target_for(profile), profile)
        self._outlines: dict[int, Outline] = {}
        self._draws: dict[int, Iterator[ScheduleSample]] = {}
        self._seed = seed

    @property
    def sketches(self) -> int:
        """Number of sketches in the space."""
        self._space.extend(self._left)
        return len(self._space)

    def rows(self) -> Iterator[Row]:
        """Yield the rows that tables have, sketch by sketch.

        A sketch is made when its first row is requested.
        """
        for number in takewhile(self._make_space, count()):
            yield from self.rows_of(number)

    def rows_of(self, sketch: int) -> list[Row]:
        """Return the rows that tables have for a sketch."""
        return self._outline(sketch).tabled

    def that_take(self, step: str, times: int = 1) -> list[int]:
        """Return the numbers of the sketches that have a step of that kind at least `times` times."""
        return [
            number
            for number in range(self.sketches)
            if sum(str(inst.kind.name) == step for inst in self._space[number].trace.insts) >= times
        ]

    def schedule_of(self, row: Row) -> Schedule | None:
        """Return the schedule with the numbers of a table's row; None where they do not fit."""
        schedule = self._begin(row.beginning).copy()
        return schedule if self._play_rest(row.rest, schedule) else None

    def of(self, sketch: int) -> Iterator[ScheduleSample]:
        """Return an iterator over the different draws of a sketch that were not returned yet."""
        if sketch not in self._draws:
            self._draws[sketch] = self._from(sketch, self._seed)
        return self._draws[sketch]

    def _make_space(self, sketch: int) -> bool:
        """Make the space as far as this sketch; return whether it has one of that number."""
        self._space.extend(islice(self._left, max(0, sketch + 1 - len(self._space))))
        return sketch < len(self._space)

    def _outline(self, sketch: int) -> Outline:
        if sketch not in self._outlines and self._make_space(sketch):
            self._outlines[sketch] = Outline(self._space[sketch], self._budget, self._driver)
        return self._outlines[sketch]

    def _from(self, sketch: int, seed: int) -> Iterator[ScheduleSample]:
        outline = self._outline(sketch)
        begun, failures = self._begin(outline.beginning), 0
        for rest in chain((row.rest for row in outline.tabled), outline.draws(Random(seed))):
            schedule = begun.copy()
            if self._play_rest(rest, schedule):
                (row,) = features(self._context, [ms.MeasureCandidate(schedule, [])])
                yield ScheduleSample(sketch, schedule, row)
                continue
            failures += 1
            if failures == _MOST_FAILURES:
                return

    def _begin(self, insts: tuple[Instruction, ...]) -> Schedule:
        """Return a schedule with these steps taken; the caller copies it."""
        if insts not in self._beginnings:
            schedule = traces.new_schedule(self._module)
            Trace(insts, {}).apply_to_schedule(schedule, remove_postproc=True)
            self._beginnings[insts] = schedule
        return self._beginnings[insts]

    def _play_rest(self, rest: Trace, schedule: Schedule) -> bool:
        """Return whether the rest of a trace, and the steps that complete it, could be applied."""
        try:
            rest.apply_to_schedule(schedule, remove_postproc=True)
            schedule.enter_postproc()
            return all(one.apply(schedule) for one in self._postprocs)
        except (ScheduleError, ValueError, RuntimeError, TypeError):
            return False  # TVM simplifies some indices so that a later step does not find the block


@dataclass(frozen=True, slots=True)
class _Extent:
    """A fixed number times drawn ones, each identified by its sample and its place there."""

    fixed: int
    drawn: tuple[tuple[int, int], ...]

    def of(self, values: _Values) -> int:
        """Return the extent for these values."""
        return self.fixed * math.prod(values[sample][place] for sample, place in self.drawn)


@dataclass(frozen=True, slots=True)
class _Tile:
    """A sample of factors of a loop, the innermost at most `most`."""

    inst: Instruction
    extent: _Extent
    parts: int
    most: int

    def draw(self, random: Random, values: _Values) -> tuple[list[int], list[int]]:
        """Draw a decision; return it and its values. All factorisations are equally likely, as in TVM."""
        left, factors = self.extent.of(values), list[int]()
        while not factors or factors[-1] > self.most:
            factors = _factors(random, left, self.parts)
        return factors, factors


@dataclass(frozen=True, slots=True)
class _Choice:
    """A sample of a single choice among several values."""

    inst: Instruction
    options: tuple[int, ...]
    chances: tuple[float, ...]

    def draw(self, random: Random, _: _Values) -> tuple[int, list[int]]:
        """Draw a decision, and return it with its value."""
        place = random.choices(range(len(self.options)), self.chances)[0]
        return place, [self.options[place]]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row of a table, as numbers for a sketch."""

    beginning: tuple[Instruction, ...]  # First steps of the sketch
    rest: Trace  # Steps after the beginning
    drawn: ScheduleTrace  # The complete trace


class Outline:
    """A sketch's samples, and its schedule's demands as products of the sampled values.

    `tabled` are the steps after the beginning with the numbers that tables have for the sketch. Loops not
    known to come from samples count as one step, so that no draw within the budget is refused.
    """

    def __init__(self, sketch: Schedule, budget: Budget, driver: DriverClass = DriverClass.ARM) -> None:
        self._budget = budget
        insts = list(sketch.trace.insts)
        begun = _beginning(insts)
        self.beginning, self._rest = tuple(insts[:begun]), insts[begun:]
        tables = starts([read(traces.to_text(sketch.trace))], driver)
        made = [{insts[n]: decision for n, decision in json.loads(one.text())[1]} for one in tables]
        self._tabled = {str(list(decisions.values())) for decisions in made}
        self.tabled = [
            Row(self.beginning, Trace(self._rest, decisions), one)
            for decisions, one in zip(made, tables, strict=True)
        ]
        whole = _read(sketch.trace)
        self._samples = whole.samples
        known, func = whole.extents(sketch), sketch.mod["main"]
        found = nests(func)
        self._held = {(_product(one.held, known), one.bits) for one in found if one.bits}
        self._written_out = {_product(one.unrolled, known) for one in found}
        self._launches = {
            (_product(one.threads, known), _product(one.groups, known))
            for one in launches(func)
            if all(loop in known for loop in (*one.threads, *one.groups))
        }

    def draws(self, random: Random) -> Iterator[Trace]:
        """Yield the steps after the beginning with numbers that fit as far as known, until none are left.

        No draw occurs twice, and none repeats a table's row.
        """
        seen = set(self._tabled)
        tries = 0
        while tries < _TRIES:
            tries += 1
            decisions, values = self._draw(random)
            key = str(list(decisions.values()))
            if key in seen or not self._fits(values):
                continue
            seen.add(key)
            tries = 0
            yield Trace(self._rest, decisions)

    def _draw(self, random: Random) -> tuple[dict[Instruction, int | list[int]], list[list[int]]]:
        decisions: dict[Instruction, int | list[int]] = {}
        values: list[list[int]] = []
        for sample in self._samples:
            decisions[sample.inst], value = sample.draw(random, values)
            values.append(value)
        return decisions, values

    def _fits(self, values: _Values) -> bool:
        least_bits = self._budget.least_bits
        size = Size(
            registers=max(
                (registers(held.of(values), bits, least_bits) for held, bits in self._held), default=0
            ),
            statements=max((one.of(values) for one in self._written_out), default=0),
        )
        return self._budget.allows(
            size, [(threads.of(values), groups.of(values)) for threads, groups in self._launches]
        )


@dataclass(slots=True)
class _Read:
    """The samples of a trace, their values, and the loops that result from them."""

    samples: list[_Tile | _Choice] = field(default_factory=list)
    values: list[list[int]] = field(default_factory=list)
    # Samples and places by loop
    loops: dict[LoopRV, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    numbers: dict[tirx.Var, tuple[int, int]] = field(default_factory=dict)

    def extent(self, places: tuple[tuple[int, int], ...], now: int) -> _Extent:
        """Return the extent of a loop that has `now` steps with the values read."""
        return _Extent(now // _Extent(1, places).of(self.values), places)

    def extents(self, sketch: Schedule) -> dict[tirx.For, _Extent]:
        """Return the known extents of the schedule's loops."""
        found: dict[tirx.For, _Extent] = {}
        for loop, places in self.loops.items():
            with suppress(ValueError):  # The loop no longer exists: its block was moved
                there: tirx.For = sketch.get(loop)
                found[there] = self.extent(places, int(there.extent))
        return found


def _beginning(insts: Sequence[Instruction]) -> int:
    """Return how many steps inline blocks before numbers are drawn; 0 where later ones name their results."""
    kinds = [str(inst.kind.name) for inst in insts]
    drawn = next((n for n, kind in enumerate(kinds) if kind.startswith("Sample")), len(kinds))
    found = max((n + 1 for n, kind in enumerate(kinds[:drawn]) if kind.endswith("Inline")), default=0)
    made = {name for inst in insts[:found] for name in inst.outputs}
    needed = (name for inst in insts[found:] for name in inst.inputs)
    return 0 if any(isinstance(name, SBlockRV | LoopRV) and name in made for name in needed) else found


def _read(trace: Trace) -> _Read:
    found = _Read()
    for inst in trace.insts:
        kind = str(inst.kind.name)
        if kind == "GetLoops" and not found.samples:  # Later ones may be of blocks that were moved
            found.loops.update(dict.fromkeys(inst.outputs, ()))
        elif kind == "SamplePerfectTile" and inst.inputs[0] in found.loops:
            factors = [int(factor) for factor in trace.decisions[inst]]
            extent = found.extent(found.loops[inst.inputs[0]], math.prod(factors))
            parts, most = (int(attribute) for attribute in inst.attrs)
            _add(found, _Tile(inst, extent, parts, most if most > 0 else math.prod(factors)), factors)
        elif kind == "SampleCategorical":
            options = tuple(int(option) for option in inst.attrs[0])
            chances = tuple(float(chance) for chance in inst.attrs[1])
            _add(found, _Choice(inst, options, chances), [options[int(trace.decisions[inst])]])
        elif kind == "Split":
            _split(found, inst)
        elif kind == "Fuse":
            fused = [found.loops.pop(loop, None) for loop in inst.inputs]
            if None not in fused:
                found.loops[inst.outputs[0]] = tuple(place for part in fused for place in part or ())
    return found


def _add(trace: _Read, sample: _Tile | _Choice, values: list[int]) -> None:
    for place, number in enumerate(sample.inst.outputs):
        trace.numbers[number] = (len(trace.samples), place)
    trace.samples.append(sample)
    trace.values.append(values)


def _split(trace: _Read, inst: Instruction) -> None:
    """Record a split: each factor is a drawn number, a fixed one, or the quotient."""
    loop, *factors = inst.inputs
    fixed = trace.loops.pop(loop, None) == () and not any(factor in trace.numbers for factor in factors)
    for made, factor in zip(inst.outputs, factors, strict=True):
        if factor in trace.numbers:
            trace.loops[made] = (trace.numbers[factor],)
        elif fixed or isinstance(factor, tirx.IntImm):
            trace.loops[made] = ()


def _product(loops: Iterable[tirx.For], loop_extents: Mapping[tirx.For, _Extent]) -> _Extent:
    extents = [loop_extents[loop] for loop in loops if loop in loop_extents]
    drawn = sorted(place for extent in extents for place in extent.drawn)
    return _Extent(math.prod(extent.fixed for extent in extents), tuple(drawn))


def _factors(random: Random, extent: int, parts: int) -> list[int]:
    """Return `parts` factors of a number; all of its factorisations are equally likely."""
    factors = [1] * parts
    for prime, times in _primes(extent):
        bars = sorted(random.sample(range(times + parts - 1), parts - 1))
        for part, (before, bar) in enumerate(zip([-1, *bars], [*bars, times + parts - 1], strict=True)):
            factors[part] *= prime ** (bar - before - 1)
    return factors


@cache
def _primes(number: int) -> tuple[tuple[int, int], ...]:
    """Return the primes of a number, with how often each divides it."""
    found, prime = list[tuple[int, int]](), 2
    while number > 1:
        if prime * prime > number:
            prime = number
        count = 0
        while number % prime == 0:
            number //= prime
            count += 1
        if count:
            found.append((prime, count))
        prime += 1
    return tuple(found)
