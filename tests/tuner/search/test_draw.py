"""Draws with their features: what their numbers tell before they are played, and that they replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tvm import te, tirx
from tvm.ir import IRModule
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir.schedule import Trace
from tvm_ffi import structural_equal

from honed.machine.families import FAMILIES
from honed.tuner.lower.schedule import fresh
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules, traces
from honed.tuner.search.budget import Size, launches_of, size_of
from honed.tuner.search.draw import Outline, SpaceSampler, draws

from .search_functions import dense, imagined, tasks

pytestmark = pytest.mark.tvm


class Anything:
    """A budget that allows everything, and keeps what it was asked last."""

    def __init__(self, least_bits: int) -> None:
        self.least_bits = least_bits

    def allows(self, size: Size, groups: Iterable[tuple[int, int]]) -> bool:
        self.size, self.groups = size, set(groups)
        return True


def played(outline: Outline, rest: Trace, module: IRModule) -> Schedule:
    schedule = traces.new_schedule(module)
    Trace(outline.beginning, {}).apply_to_schedule(schedule, remove_postproc=True)
    rest.apply_to_schedule(schedule, remove_postproc=True)
    return schedule


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", ["dense with bias", "softmax", pytest.param("convolution 3x3", marks=pytest.mark.slow)]
)
def test_numbers_tell_no_more_than_what_they_make_asks_for(family: str, name: str, tmp_path: Path) -> None:
    one = imagined(family)
    for task in tasks(name, tmp_path, one):
        module = traces.as_module(task.func)
        for sketch in rules.space(task.func, target_for(one), one):
            asked = Anything(rules.budget(one).least_bits)
            outline = Outline(sketch, asked)
            for rest in islice(outline.draws(Random(2)), 4):
                try:
                    func = played(outline, rest, module).mod["main"]
                except ScheduleError:
                    continue
                size = size_of(func, asked.least_bits)
                assert asked.size.registers <= size.registers
                assert asked.size.statements <= size.statements
                assert asked.groups <= set(launches_of(func))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_fits_no_device_is_not_played(family: str) -> None:
    one, func = imagined(family), dense(96, 128, 64)
    budget, module = rules.budget(one), traces.as_module(func)
    # What the slices' sums ask for is known only when they are played.
    space = [s for s in rules.space(func, target_for(one), one) if "rfactor" not in traces.steps(s.trace)]
    outlines = [Outline(sketch, budget) for sketch in space]
    found = [played(o, rest, module) for o in outlines for rest in islice(o.draws(Random(1)), 4)]
    assert len(found) > len(space)
    assert all(budget.apply(schedule) for schedule in found)


def test_every_factorisation_is_as_likely() -> None:
    """48 in two: eight, of which the inner factor is at most 16."""
    x = te.placeholder((48,), name="x")
    func = te.create_prim_func([x, te.compute((48,), lambda i: x[i] + 1, name="y")])
    sketch = traces.new_schedule(traces.as_module(func))
    loop = sketch.get_loops(sketch.get_sblock("y"))[0]
    sketch.split(loop, sketch.sample_perfect_tile(loop, n=2, max_innermost_factor=16))
    outline, found = Outline(sketch, Anything(1)), Counter[tuple[int, ...]]()
    for seed in range(1600):
        (decision,) = next(outline.draws(Random(seed))).decisions.values()
        found[tuple(int(factor) for factor in decision)] += 1
    assert set(found) == {(48 // inner, inner) for inner in (1, 2, 3, 4, 6, 8, 12, 16)}
    assert min(found.values()) > 140


@pytest.mark.parametrize("family", ["cpu", "mali"])
def test_draws_are_the_same_every_time_differ_and_replay(family: str) -> None:
    one, func = imagined(family), dense(96, 128, 64)
    before = fresh(func)
    found, again = draws(func, one, 1, 1), draws(func, one, 1, 1)
    assert [draw.trace for draw in found] == [draw.trace for draw in again]
    assert all(np.array_equal(a.features, b.features) for a, b in zip(found, again, strict=True))
    assert len({draw.trace for draw in found}) == len(found)
    assert structural_equal(func, before)
    for draw in found:
        assert structural_equal(traces.apply(draw.trace, func).mod["main"], draw.scheduled)


def test_draws_of_a_sketch_go_on_where_they_were_left() -> None:
    one, func = imagined("cpu"), dense(96, 128, 64)
    drawing = SpaceSampler(func, one, 1)
    first, second = next(drawing.of(0)), next(drawing.of(0))
    assert [first.trace, second.trace] == [draw.trace for draw in draws(func, one, 2, 1)[:2]]


def test_a_sketch_of_which_nothing_fits_is_left() -> None:
    one, func = imagined("cpu"), dense(96, 128, 64)

    class Nothing(Anything):
        def allows(self, size: Size, groups: Iterable[tuple[int, int]]) -> bool:
            return False

    (sketch, *_) = rules.space(func, target_for(one), one)
    assert list(Outline(sketch, Nothing(1)).draws(Random(1))) == []


def test_spaces_are_the_same_every_time() -> None:
    """Whatever was sampled while a sketch was made: some numbers make no schedule of this one."""
    one = imagined("mali")
    func = _depthwise()
    found = [[traces.to_text(s.trace) for s in rules.space(func, target_for(one), one)] for _ in range(2)]
    assert found[0] == found[1]


def _depthwise() -> tirx.PrimFunc:
    x, w = te.placeholder((48, 65, 65), name="x"), te.placeholder((48, 3, 3), name="w")
    r, s = te.reduce_axis((0, 3), name="r"), te.reduce_axis((0, 3), name="s")

    def at(c: tirx.Var, i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return te.sum(x[c, 2 * i + r, 2 * j + s] * w[c, r, s], axis=[r, s])

    found = te.compute((48, 32, 32), at, name="found")
    return te.create_prim_func([x, w, te.compute(found.shape, lambda c, i, j: te.max(found[c, i, j], 0.0))])
