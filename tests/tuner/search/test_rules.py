"""What each family's rules allow, and that draws stay within it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import te, topi
from tvm.s_tir import Schedule

from honed.machine.devices import rules_for
from honed.machine.families import FAMILIES
from honed.tuner.lower.opencl import lower_function
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules
from honed.tuner.search.budget import Budget, Size, Threads, size_of
from honed.tuner.search.parts import Keep, lane_choices, lanes_of, parts
from honed.tuner.search.rules import grouped_sketches, sketches
from honed.tuner.search.traces import as_module

from .search_functions import dense, draws, imagined

pytestmark = pytest.mark.tvm

NONE = Size(registers=1 << 30, statements=1 << 30)


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_stay_within_the_imagined(family: str) -> None:
    one = imagined(family, 64)
    small = replace(rules_for(FAMILIES[family], one.limits), max_vector_bytes=8, max_unroll=2)
    found = rules.rules_of(replace(one, rules=small))
    assert found.sketches.vector_bytes <= 8
    assert found.sketches.unroll <= 2
    assert max(found.sketches.threads) <= 64
    if found.groups is not None:
        assert max(found.groups.threads) <= 64


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_hold_their_budget(family: str) -> None:
    one = imagined(family)
    func = dense(192, 256, 128)
    family_rules = rules.rules_of(one)
    space = rules.space(func, target_for(one), one)
    drawn = draws(func, one, space, 12)
    assert len(drawn) >= 6
    for schedule in drawn:
        size = size_of(schedule.mod["main"])
        assert 0 < size.registers <= family_rules.most.registers
        for launch in lower_function(schedule.mod["main"], "main", target_for(one), one).launches:
            x, y, z = launch.block
            assert family_rules.least_threads <= x * y * z <= one.rules.max_threads
            assert x * y * z % family_rules.warp == 0


@pytest.mark.parametrize("family", ["cpu", "mali"])
def test_the_budget_is_needed(family: str) -> None:
    """Without it tiles are drawn whose accumulators no device of the family holds in registers."""
    one = imagined(family)
    func = dense(256, 256, 128)
    found = list(sketches(func, rules.rules_of(one).sketches))
    free = draws(func, one, found, 96, postprocs=[Budget(NONE, Threads(least=1, most=1024), 1)])
    most = rules.rules_of(one).most.registers
    assert max(size_of(schedule.mod["main"]).registers for schedule in free) > most


@pytest.mark.parametrize(
    ("threads", "groups", "allowed"),
    [
        (16, 4, True),
        (32, 1, True),
        (12, 4, False),
        (12, 3, True),
        (8, 4, False),
        (24, 2, False),
        (512, 1, False),
        (1, 5, True),
    ],
)
def test_groups_are_whole_warps_where_they_can_be(threads: int, groups: int, *, allowed: bool) -> None:
    """48 work-items may be three warps in three groups; 36, or 5, are none whatever their groups."""
    assert Threads(least=1, most=256, warp=16).allow(threads, groups) == allowed


@pytest.mark.parametrize(("family", "copied"), [("mali", False), ("gpu", True), ("gpu", False)])
def test_operands_are_copied_into_local_memory_only_where_that_pays(family: str, *, copied: bool) -> None:
    found = imagined(family)
    one = replace(found, rules=replace(found.rules, local_memory=copied))
    groups = rules.rules_of(one).groups
    assert groups is not None
    assert groups.tile is not None
    func = dense(1024, 512, 64)  # so many outputs that no sums are sliced, which takes local memory, too
    space = grouped_sketches(func, groups.tile, rules.rules_of(one).sketches)
    drawn = draws(func, one, space, 4)
    assert drawn
    for schedule in drawn:
        lowered = lower_function(schedule.mod["main"], "main", target_for(one), one)
        assert ("__local" in lowered.source) == copied
        assert ("barrier(" in lowered.source) == copied


def test_halves_go_in_vectors() -> None:
    """Their arithmetic comes in pairs on a Mali, and loads pay up to 128 bits."""
    limits = rules.rules_of(imagined("mali")).sketches
    assert lane_choices(dense(8, 8, 8, "float16"), limits) == (8, 4)
    assert lane_choices(dense(8, 8, 8), limits) == (4, 2)


def test_a_padded_input_is_computed_once_where_it_is_asked_for() -> None:
    x, w = te.placeholder((1, 4, 8, 8), name="x"), te.placeholder((4, 4, 3, 3), name="w")
    func = te.create_prim_func([x, w, topi.nn.conv2d_nchw(x, w, 1, 1, 1)])
    kept = [parts(Schedule(as_module(func)), keep) for keep in (Keep.PADDING, Keep.DEAR)]
    assert [[one.is_reduction for one in found] for found in kept] == [[False, True], [True]]


@pytest.mark.parametrize(("extent", "most", "lanes"), [(16, 16, 16), (24, 16, 8), (13, 8, 1), (6, 4, 2)])
def test_lanes_divide_the_extent(extent: int, most: int, lanes: int) -> None:
    assert lanes_of(extent, most) == lanes


def test_what_no_sketch_fits_is_bound_on_a_cpu() -> None:
    """A scan along one axis is no elementwise block and no reduction that the sketches know."""
    x = te.placeholder((6, 5, 9), name="x")
    k, j = te.reduce_axis((0, 5), name="k"), te.reduce_axis((0, 9), name="j")
    first = te.compute((6, 9), lambda i, c: te.sum(x[i, k, c], axis=k), name="first")
    second = te.compute((6,), lambda i: te.max(first[i, j], axis=j), name="second")
    one = imagined("cpu")
    func = te.create_prim_func([x, second])
    assert list(sketches(func, rules.rules_of(one).sketches)) == []
    space = rules.space(func, target_for(one), one)
    drawn = draws(func, one, space, 1)
    assert drawn
    assert lower_function(drawn[0].mod["main"], "main", target_for(one), one).launches
