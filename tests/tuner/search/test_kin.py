"""Decisions as values: kin's tiles divide the new extents, and neighbours differ in a single decision."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.tuner.search.batches import adapt_all, distance, neighbours
from honed.tuner.search.traces import Choice, Decision, ScheduleTrace, Tile, adapt, divisors, nearest, read

pytestmark = pytest.mark.tvm

EXTENTS = st.integers(1, 4096)


@st.composite
def tiles(draw: st.DrawFn, extent: int | None = None, parts: int | None = None) -> Tile:
    """A tile as TVM draws them: the innermost is within its bound."""
    left = extent or draw(EXTENTS)
    most = draw(st.integers(1, 64))
    parts = parts or draw(st.integers(2, 4))
    factors: list[int] = []
    for place in range(parts - 1):
        factor = draw(st.sampled_from([d for d in divisors(left) if place or d <= most]))
        factors.append(factor)
        left //= factor
    return Tile((left, *reversed(factors)), most)


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    options = draw(st.integers(1, 6))
    return Choice(draw(st.integers(0, options - 1)), options)


def drawn(*decisions: Decision) -> ScheduleTrace:
    """As read from a trace that has nothing but samples."""
    steps, made = [], []
    for n, decision in enumerate(decisions):
        if isinstance(decision, Tile):
            steps.append(["SamplePerfectTile", ["l0"], [len(decision.factors), decision.most], ["v0"]])
            made.append([n, list(decision.factors)])
        else:
            chances = [1 / decision.options] * decision.options
            steps.append(["SampleCategorical", [], [list(range(decision.options)), chances], ["v0"]])
            made.append([n, decision.index])
    return read(json.dumps([steps, made]))


@given(tiles(), EXTENTS, st.integers(1, 64))
def test_the_nearest_tile_divides_the_extent(tile: Tile, extent: int, most: int) -> None:
    factors = nearest(tile.factors, extent, most)
    assert len(factors) == len(tile.factors)
    assert math.prod(factors) == extent
    assert factors[-1] <= most


@given(tiles())
def test_the_nearest_tile_of_the_same_extent_is_the_same(tile: Tile) -> None:
    assert nearest(tile.factors, tile.extent, tile.most) == tile.factors


def test_tiles_keep_their_size_in_a_larger_function() -> None:
    assert nearest((32, 8), 512, 16) == (64, 8)
    assert nearest((32, 8), 36, 16) == (4, 9)
    assert nearest((4, 2, 16), 96, 16) == (3, 2, 16)


@given(st.lists(st.one_of(tiles(), choices()), max_size=5), st.data())
def test_decisions_adapted_to_other_extents_fit_them(decisions: list[Decision], data: st.DataObject) -> None:
    ours = [data.draw(tiles(parts=len(d.factors)) if isinstance(d, Tile) else choices()) for d in decisions]
    made = adapt(drawn(*decisions), drawn(*ours))
    assert made is not None
    for place, decision in enumerate(ours):
        found = made.decisions[place]
        if isinstance(decision, Tile) and isinstance(found, Tile):
            assert found.extent == decision.extent
            assert found.factors[-1] <= decision.most
        else:
            assert isinstance(found, Choice)
            assert found.index < found.options


def test_schedules_of_another_form_are_no_kin() -> None:
    assert adapt(drawn(Tile((4, 2), 8)), drawn(Tile((4, 2, 1), 8))) is None
    assert adapt(drawn(Tile((4, 2), 8)), drawn(Choice(0, 2))) is None


def test_what_is_inlined_does_not_matter() -> None:
    around = [["GetSBlock", [], ["p", "main"], ["b0"]], ["ComputeInline", ["b0"], [], []]]
    sample = ["SamplePerfectTile", ["l0"], [2, 8], ["v0", "v1"]]
    kin = read(json.dumps([[*around, sample], [[2, [4, 4]]]]))
    made = adapt(kin, drawn(Tile((1, 24), 8)))
    assert made is not None
    assert made.decisions[0] == Tile((6, 4), 8)


def test_the_nearest_kin_comes_first_and_none_twice() -> None:
    ours = drawn(Tile((1, 64), 16))
    near, far, same = drawn(Tile((16, 8), 16)), drawn(Tile((1024, 4), 16)), drawn(Tile((32, 4), 16))
    assert distance(near, ours) < distance(far, ours)
    found = adapt_all([far, same, near], [ours], 8)
    assert [one.decisions[0] for one in found] == [Tile((16, 4), 16), Tile((8, 8), 16)]
    assert len(adapt_all([far, near], [ours], 1)) == 1


@given(st.lists(st.one_of(tiles(), choices()), max_size=4))
def test_neighbours_differ_in_one_decision_and_keep_the_extents(decisions: list[Decision]) -> None:
    here = drawn(*decisions)
    found = neighbours(here)
    assert len({one.text() for one in found}) == len(found)
    for one in found:
        (place,) = [n for n, decision in here.decisions.items() if one.decisions[n] != decision]
        before, after = here.decisions[place], one.decisions[place]
        if isinstance(before, Tile):
            assert isinstance(after, Tile)
            assert after.extent == before.extent
            assert after.factors[-1] <= max(before.most, before.factors[-1])
        else:
            assert isinstance(after, Choice)
            assert abs(after.index - before.index) == 1
            assert 0 <= after.index < after.options


@given(tiles(parts=2))
def test_every_tile_is_reached_step_by_step(tile: Tile) -> None:
    reached, new = {tile.factors}, [tile]
    while new:
        found = {one.decisions[0] for here in new for one in neighbours(drawn(here))}
        new = [one for one in found if isinstance(one, Tile) and one.factors not in reached]
        reached |= {one.factors for one in new}
    expected = {(tile.extent // d, d) for d in divisors(tile.extent) if d <= tile.most}
    assert reached == expected


def test_what_was_added_after_the_draw_is_left_out() -> None:
    sample = ["SamplePerfectTile", ["l0"], [2, 8], ["v0", "v1"]]
    text = json.dumps([[sample, ["EnterPostproc", [], [], []], sample], [[0, [4, 4]], [2, [4, 4]]]])
    one = read(text)
    assert len(one.steps) == 1
    assert json.loads(one.text())[1] == [[0, [4, 4]]]


@pytest.mark.parametrize("text", ["[]", "3", "{}", "nonsense", '[[["SamplePerfectTile"]], [[0, [1, 2]]]]'])
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no trace|Expecting|unpack"):
        read(text)
