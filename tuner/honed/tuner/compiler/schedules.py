"""Chooses the schedule with which a function is compiled.

The best recorded, else one that needs no trial: the best of many draws by the family's prior, else a row of a
table or a default rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tvm import s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm.target import Target
from tvm_ffi import structural_walk

from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.runtime.compiled.model import ScheduleProvenance, ScheduleSource
from honed.tuner.lower.module import Choose
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import by_rule, default_kernels, narrow_indices
from honed.tuner.lower.workload import form_key, function_bytes, function_flops
from honed.tuner.records.rows import TuningRecord
from honed.tuner.records.store import Records
from honed.tuner.search import traces
from honed.tuner.search.costmodel import Prior, prior_of
from honed.tuner.search.draw import Row, ScheduleSample, SpaceSampler, features_of
from honed.tuner.search.rules import point_space, rules_of
from honed.tuner.search.sketches.attention import attention_of
from honed.tuner.search.sketches.blockwise import shares_blocks
from honed.tuner.search.sketches.convolutions import packed_clocks, window_loads
from honed.tuner.search.sketches.grouped import groups_of, units_of
from honed.tuner.search.sketches.held import held_clocks
from honed.tuner.search.sketches.one_row import one_row_of, shares_row
from honed.tuner.setup import PREDICTED, for_defaults, setup_for


@dataclass(frozen=True, slots=True)
class Recorded:
    """The records of a device, driver and compiler: the best schedules, and seconds by task."""

    schedules: Choose
    times: Mapping[str, float]


NOTHING = Recorded(lambda _task, _func: None, MappingProxyType({}))


def read_records(path: Path, profile: DeviceProfile) -> Recorded:
    """Return the records that compiling needs from a file, of this device, driver and compiler.

    They name the fastest right schedule of a task; where the default schedule was measured to be faster,
    none. Tasks that were never timed have no time.
    """
    identity = profile.identity
    setup = setup_for(identity)
    with Records.open(path) as records:
        defaults = records.defaults(for_defaults(setup, profile.rules.family))
        times = {workload: default.seconds for workload, default in defaults.items()}
        host, best = records.measured_by, dict[str, TuningRecord]()
        for one in records.distil(setup):
            if one.timing is not None and one.timing.fair_s < times.get(one.workload, math.inf):
                best[one.workload], times[one.workload] = one, one.timing.fair_s

    def choose(task: str, func: tirx.PrimFunc) -> tuple[str, tirx.PrimFunc] | None:
        found = best.get(task)
        if found is None:
            return None
        schedule = traces.apply(found.trace, narrow_indices(func))
        return str(_origin(found, identity, host)), schedule.mod["main"]

    return Recorded(choose, times)


def _origin(record: TuningRecord, identity: DeviceIdentity, host: str) -> ScheduleProvenance:
    name = record.trace_sha256[:12]
    if identity.platform == PREDICTED:
        return ScheduleProvenance(ScheduleSource.PREDICTED, name, record.way)
    if record.measured_by != host:
        return ScheduleProvenance(ScheduleSource.RECORD, name)
    return ScheduleProvenance(ScheduleSource.MEASURED, name, record.way)


# Draws at most: for each sketch, in all, and in all for functions of many operations. By the bench for Malis,
# over two or three seeds: LightGlue's products take as long with the picks of 24 shared out by scores as with
# those of 4 from each sketch (35), 8 % longer with those of 16; every third function of MobileNet takes 5 %
# longer with those of 12, 2 % with those of 16.
_EACH, _DRAWS, _MORE_DRAWS, _MANY_FLOPS = 4, 12, 24, 1 << 23
_UNTRIED = 0.2  # Bonus to a sketch's best score after one draw; half of it after two
_TRIED = 4  # Schedules tried, best by the prior first, until one can be lowered
_SEED = 1
_SLICE = "RFactor"  # A step that only sliced products take
# A step that only packed convolutions take twice, for weights and for results. By the bench for Malis these
# win wherever they fit, so nothing else is drawn there.
_PACK = "TransformLayout", 2
_PRODUCT_AXES = 3  # Axes of a product's output: a batch, rows and columns; images have more
_MATRIX_AXES = 2  # Axes of an output, with more than one element each
_ONE_BLOCK = 2  # Blocks of a function that is one operator, with the root
_FILLED = 0.7  # Work-groups for each compute unit, at least
# Work of functions that take about as long as their launch with any schedule: a rule does for them, except
# for images that a table cuts (the rules' schedule of 336 channels of 4 x 4 takes 50 us on PoCL, the table's
# 9).
_SMALL_FLOPS, _SMALL_BYTES = 1 << 17, 1 << 16


def untuned_kernels(
    func: tirx.PrimFunc,
    name: str,
    target: Target,
    profile: DeviceProfile,
    *,
    traces_by_form: dict[int, tuple[str, Trace] | None] | None = None,
) -> tuple[str, Lowered, list[str]]:
    """Return the kernels that need no trial: their origin, the kernels, and why others were passed over.

    `traces_by_form` has origins and traces of the schedules chosen for other functions, by `form_key`, None
    where a rule replaced them: functions of one form share a schedule, and new ones are added. Raises
    LoweringFailed as `default_kernels` does.
    """
    passed_over: list[str] = []
    traces_by_form = {} if traces_by_form is None else traces_by_form
    form = form_key(func)
    before = traces_by_form.get(form)
    if before is not None:
        with suppress(LoweringFailed):
            scheduled = traces.apply(before[1], narrow_indices(func)).mod["main"]
            return before[0], lower_function(scheduled, name, target, profile), passed_over
    elif form in traces_by_form:
        return default_kernels(func, name, target, profile)
    one = _Function(func, target, profile)
    sources = (schedules(one) for schedules, serves in _SOURCES if serves(one))
    for origin, schedule in islice(chain.from_iterable(sources), _TRIED):
        try:
            lowered = lower_function(schedule.mod["main"], name, target, profile)
        except LoweringFailed as failed:
            passed_over.append(f"{origin}: {failed}")
            continue
        traces_by_form[form] = origin, schedule.trace
        return origin, lowered, passed_over
    traces_by_form.setdefault(form, None)
    rule, lowered, more = default_kernels(func, name, target, profile)
    return rule, lowered, [*passed_over, *more]


@dataclass(frozen=True)
class _Function:
    """A function to schedule, with facts for the sources of schedules, each computed once."""

    func: tirx.PrimFunc
    target: Target
    profile: DeviceProfile

    @cached_property
    def prior(self) -> Prior | None:
        """The prior that the family learned from records; None where there is none."""
        return prior_of(self.profile.rules.family, self.profile.driver)

    @cached_property
    def drawing(self) -> SpaceSampler:
        """The sampler for draws and for rows of tables."""
        return SpaceSampler(narrow_indices(self.func), self.profile, _SEED)

    @cached_property
    def worth_drawing(self) -> bool:
        """Return whether the function takes longer than its launch, or rules make several kernels of it."""
        small = function_flops(self.func) < _SMALL_FLOPS and function_bytes(self.func) < _SMALL_BYTES
        return not small or _several(self.func, self.profile)

    @property
    def is_image(self) -> bool:
        """Return whether the output has more axes than products have."""
        return len(self.func.params[-1].shape) > _PRODUCT_AXES


_Schedules = Iterator[tuple[str, Schedule]]  # The best first, each with its origin


def _of_rows(one: _Function) -> _Schedules:
    """Yield the rows of tables, on GPUs those first that take the fewest clocks."""
    driver = one.profile.driver
    rows: Iterable[Row] = one.drawing.rows()

    def clocks(row: Row) -> tuple[float, ...]:
        return held_clocks(row.drawn, driver), window_loads(row.drawn), packed_clocks(row.drawn, driver)

    if not one.profile.family.processor:
        rows = sorted(rows, key=clocks)
    for row in rows:
        if (schedule := one.drawing.schedule_of(row)) is not None:
            yield _tables(one), schedule


def _tables(one: _Function) -> str:
    return str(ScheduleProvenance(ScheduleSource.TABLES, one.profile.rules.family))


def _of_tables(one: _Function) -> _Schedules:
    """Yield contractions with the rows of tables that keep most of the device busy, sums in slices first.

    After them come those with most groups, but not for products of a vector, whose sums the rules share out.
    """
    func, drawing = one.func, one.drawing
    sliced = drawing.that_take(_SLICE)
    others = [sketch for sketch in range(drawing.sketches) if sketch not in sliced]
    rows = [row for sketch in (*sliced, *others) for row in drawing.rows_of(sketch)]
    least = _FILLED * one.profile.limits.compute_units
    vector = sum(int(extent) > 1 for extent in func.params[-1].shape) < _MATRIX_AXES
    if vector and attention_of(func) is None:
        shared = (shares_blocks, shares_row)
        rows = [row for row in rows if any(f(row.drawn) for f in shared) or groups_of(row.drawn) >= least]
    for row in sorted(rows, key=lambda row: max(0.0, least - units_of(row.drawn))):
        if (schedule := drawing.schedule_of(row)) is not None:
            yield _tables(one), schedule


def _of_prior(one: _Function) -> _Schedules:
    """Yield draws, and the rule's schedule where the prior knows rules, the best by the prior first."""
    drawing, prior = one.drawing, one.prior
    assert prior is not None
    packed = drawing.that_take(*_PACK)
    drawn = _draw(drawing, packed or range(drawing.sketches), prior, function_flops(one.func))
    found = [(each.schedule, each.features) for each in drawn]
    sketched = bool(packed) or point_space(narrow_indices(one.func), one.profile)
    ruled = by_rule(one.func, one.target, one.profile) if prior.knows_rules and not sketched else None
    if ruled is not None:
        with suppress(RuntimeError):  # TVM cannot lower it
            found.append((ruled[1], features_of(ruled[1].mod["main"], one.profile)))
    scores = prior.predict(np.array([features for _, features in found])) if found else np.zeros(0)
    for n in np.argsort(-scores, kind="stable"):
        if ruled is not None and found[n][0] is ruled[1]:
            yield ruled
            return
        yield prior.name, found[n][0]


def _draw(drawing: SpaceSampler, sketches: Sequence[int], prior: Prior, flops: int) -> list[ScheduleSample]:
    """Return draws, one from each sketch first, then more from those whose draws the prior scores best."""
    found = [one for sketch in sketches for one in islice(drawing.of(sketch), 1)]
    scores = {one.sketch: [score] for one, score in zip(found, _scores(found, prior), strict=True)}
    most = _MORE_DRAWS if flops >= _MANY_FLOPS else _DRAWS
    while scores and len(found) < min(most, _EACH * len(sketches)):
        sketch = max(scores, key=lambda n: max(scores[n]) + _UNTRIED / len(scores[n]))
        one = next(drawing.of(sketch), None)
        if one is None:
            del scores[sketch]
            continue
        found.append(one)
        scores[sketch] += _scores([one], prior)
    return found


def _scores(drawn: Sequence[ScheduleSample], prior: Prior) -> list[float]:
    if not drawn:
        return []
    return [float(score) for score in prior.predict(np.array([one.features for one in drawn]))]


def _several(func: tirx.PrimFunc, profile: DeviceProfile) -> bool:
    """Return whether work-items compute parts of a function one after another.

    These are attentions and products of one row, and on processors and Malis all: a launch costs as much as a
    small function there, and rules give parts launches of their own.
    """
    if attention_of(func) is not None or (profile.family.rows and one_row_of(func) is not None):
        return True
    blocks: list[s_tir.SBlock] = []
    structural_walk(func.body, [(s_tir.SBlock, blocks.append)], order="pre")
    reduces = any(a.iter_type == tirx.IterVar.CommReduce for block in blocks for a in block.iter_vars)
    return reduces and len(blocks) > _ONE_BLOCK and rules_of(profile).sketches.contractions


# Sources of schedules that need no trial, in order, each with its condition; rules follow them.
_SOURCES: tuple[tuple[Callable[[_Function], _Schedules], Callable[[_Function], bool]], ...] = (
    (_of_tables, lambda one: one.prior is None and one.worth_drawing),
    (_of_rows, lambda one: one.prior is not None and (one.worth_drawing or one.is_image)),
    (_of_prior, lambda one: one.prior is not None and one.worth_drawing),
)
