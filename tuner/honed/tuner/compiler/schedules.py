"""Which schedule a function is compiled with.

The best recorded, else one that needs no trial: the best of many draws by the family's prior, else a row of a
table or a default rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tvm import s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm.target import Target
from tvm_ffi import structural_walk

from honed.machine.families import DriverClass
from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.runtime.compiled.model import Origin, ScheduleSource
from honed.tuner.lower.module import Choose
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import by_rule, default_kernels, narrow_indices
from honed.tuner.lower.workload import form_key, function_bytes, function_flops
from honed.tuner.records import Records, TuningRecord
from honed.tuner.search import traces
from honed.tuner.search.costmodel import Array, Prior, prior_of
from honed.tuner.search.decisions import Drawn
from honed.tuner.search.draw import Draw, Drawing, Row, features_of
from honed.tuner.search.rules import point_space, rules_of
from honed.tuner.search.sketches.attention import attention_of
from honed.tuner.search.sketches.blockwise import shares_blocks
from honed.tuner.search.sketches.convolutions import packed_clocks, window_loads
from honed.tuner.search.sketches.grouped import groups_of
from honed.tuner.search.sketches.held import held_clocks
from honed.tuner.search.sketches.one_row import one_row_of, shares_row
from honed.tuner.setup import PREDICTED, for_defaults, setup_for


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the records say of a device, driver and compiler: which schedules are best, seconds by task."""

    schedules: Choose
    times: Mapping[str, float]


NOTHING = Recorded(lambda _task, _func: None, MappingProxyType({}))


def recorded(path: Path, profile: DeviceProfile) -> Recorded:
    """Return all that compiling takes from a file of records, of this device, driver and compiler.

    It holds the fastest right schedule of a task; where the default schedule was measured to be faster, that
    one is left in place. What was never timed has no time.
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


def _origin(found: TuningRecord, identity: DeviceIdentity, host: str) -> Origin:
    name = found.trace_sha256[:12]
    if identity.platform == PREDICTED:
        return Origin(ScheduleSource.PREDICTED, name, found.way)
    if found.measured_by != host:
        return Origin(ScheduleSource.RECORD, name)
    return Origin(ScheduleSource.MEASURED, name, found.way)


# Draws at most: for each sketch that there is, in all, and in all for functions of many operations. By the
# bench for Malis, over two or three seeds: LightGlue's products take as long with the picks of 24 shared out
# by scores as with those of 4 from each sketch (35), 8 % longer with those of 16; every third function of
# MobileNet takes 5 % longer with those of 12, 2 % with those of 16.
_EACH, _DRAWS, _MORE_DRAWS, _MANY_FLOPS = 4, 12, 24, 1 << 23
_UNTRIED = 0.2  # by which a sketch's best score is raised after one draw; after two by half of it
_TRIED = 4  # of the best by the prior, until one can be lowered
_SEED = 1
_SLICE = "RFactor"  # a step that only sliced products take
# A step that only packed convolutions take twice, for weights and for results. By the bench for Malis these
# win wherever they fit, so nothing else is drawn there.
_PACK = "TransformLayout", 2
_PRODUCT_AXES = 3  # of a product's output: a batch, rows and columns; those of images are more
_MATRIX_AXES = 2  # of an output, with more than one element each
_ONE_BLOCK = 2  # of a function that is one operator: the root is one, too
_FILLED = 0.7  # work-groups for each compute unit, at least
# What takes about as long as its launch, whatever its schedule: a rule does for it, unless it is an image
# that a table cuts (the rules' schedule of 336 channels of 4 x 4 takes 50 us on PoCL, the table's 9).
_SMALL_FLOPS, _SMALL_BYTES = 1 << 17, 1 << 16


def first_kernels(
    func: tirx.PrimFunc,
    name: str,
    target: Target,
    profile: DeviceProfile,
    *,
    known: dict[int, tuple[str, Trace] | None] | None = None,
) -> tuple[str, Lowered, list[str]]:
    """Return the kernels that need no trial: their origin, the kernels, and why others were passed over.

    `known` has origins and traces of what was picked for other functions, by `form_key`, None where a rule
    took its place: what one got is taken for all of its form, and added. Raises LoweringFailed as
    `default_kernels` does.
    """
    passed_over: list[str] = []
    known = {} if known is None else known
    form = form_key(func)
    before = known.get(form)
    if before is not None:
        with suppress(LoweringFailed):
            scheduled = traces.apply(before[1], narrow_indices(func)).mod["main"]
            return before[0], lower_function(scheduled, name, target, profile), passed_over
    elif form in known:
        return default_kernels(func, name, target, profile)
    for origin, schedule in islice(_picked(func, target, profile), _TRIED):
        try:
            lowered = lower_function(schedule.mod["main"], name, target, profile)
        except LoweringFailed as failed:
            passed_over.append(f"{origin}: {failed}")
            continue
        known[form] = origin, schedule.trace
        return origin, lowered, passed_over
    known.setdefault(form, None)
    rule, lowered, more = default_kernels(func, name, target, profile)
    return rule, lowered, [*passed_over, *more]


def _picked(func: tirx.PrimFunc, target: Target, profile: DeviceProfile) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules to try before the rules, the best first, each with where it comes from."""
    small, family = _small(func), profile.rules.family
    several = small and _several(func, profile)  # of which rules make a kernel each
    image = len(func.params[-1].shape) > _PRODUCT_AXES
    prior = prior_of(family, profile.driver)
    if small and not several and (prior is None or not image):
        return
    origin = str(Origin(ScheduleSource.TABLES, family))
    if prior is None:
        yield from ((origin, one) for one in _tabled(func, profile))
        return
    narrow = narrow_indices(func)
    drawing = Drawing(narrow, profile, _SEED)
    rows: Iterable[Row] = drawing.rows()
    if not profile.family.processor:
        rows = sorted(rows, key=lambda one: _rank(one.drawn, profile.driver))
    yield from ((origin, one) for row in rows if (one := drawing.schedule_of(row)) is not None)
    if small and not several:
        return
    packed = drawing.that_take(*_PACK)
    drawn = _drawn(drawing, packed or range(drawing.sketches), prior, function_flops(func))
    found = [(one.schedule, one.features) for one in drawn]
    sketched = bool(packed) or point_space(narrow, profile)
    ruled = by_rule(func, target, profile) if prior.knows_rules and not sketched else None
    if ruled is not None:
        with suppress(RuntimeError):  # TVM cannot lower it
            found.append((ruled[1], features_of(ruled[1].mod["main"], profile)))
    for one in _best_first(found, prior):
        if ruled is not None and one is ruled[1]:
            yield ruled[0], one
            return
        yield prior.name, one


def _rank(row: Drawn, driver: DriverClass) -> tuple[float, ...]:
    return held_clocks(row, driver), window_loads(row), packed_clocks(row, driver)


def _tabled(func: tirx.PrimFunc, profile: DeviceProfile) -> Iterator[Schedule]:
    """Return contractions with rows of the tables that give most of the device work, sums in slices first.

    After them come those with most groups, but not for products of a vector, whose sums the rules share out.
    """
    drawing = Drawing(narrow_indices(func), profile, _SEED)
    sliced = drawing.that_take(_SLICE)
    others = [sketch for sketch in range(drawing.sketches) if sketch not in sliced]
    rows = [one for sketch in (*sliced, *others) for one in drawing.tabled(sketch)]
    least = _FILLED * profile.limits.compute_units
    vector = sum(int(extent) > 1 for extent in func.params[-1].shape) < _MATRIX_AXES
    if vector and attention_of(func) is None:
        shared = (shares_blocks, shares_row)
        rows = [one for one in rows if any(f(one.drawn) for f in shared) or groups_of(one.drawn) >= least]
    rows.sort(key=lambda one: max(0.0, least - groups_of(one.drawn)))
    return (made for one in rows if (made := drawing.schedule_of(one)) is not None)


def _drawn(drawing: Drawing, sketches: Sequence[int], prior: Prior, flops: int) -> list[Draw]:
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


def _scores(drawn: Sequence[Draw], prior: Prior) -> list[float]:
    if not drawn:
        return []
    return [float(score) for score in prior.predict(np.array([one.features for one in drawn]))]


def _best_first(found: Sequence[tuple[Schedule, Array]], prior: Prior) -> list[Schedule]:
    if not found:
        return []
    scores = prior.predict(np.array([features for _, features in found]))
    return [found[n][0] for n in np.argsort(-scores, kind="stable")]


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


def _small(func: tirx.PrimFunc) -> bool:
    return function_flops(func) < _SMALL_FLOPS and function_bytes(func) < _SMALL_BYTES
