"""Curves in a terminal and as pictures, whatever the numbers."""

from __future__ import annotations

import itertools
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.daemon.cli import lettering, plot
from honed.daemon.cli.picture import HEIGHT, WIDTH, label_places, png
from honed.daemon.cli.plot import Curve, Mark
from honed.daemon.cli.tasks import milliseconds, short

POINTS = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e9)), min_size=1, max_size=40).map(sorted)


def curve(points: list[tuple[float, float]], marks: tuple[Mark, ...] = ()) -> Curve:
    return Curve(title="t", x_name="trials", y_name="ms", points=points, marks=marks)


@given(POINTS, st.integers(20, 200), st.integers(4, 40), st.booleans())
def test_any_curve_fits_its_room(
    points: list[tuple[float, float]], width: int, height: int, braille: bool
) -> None:
    lines = plot.text(curve(points), width, height, braille=braille)
    assert len(lines) == height + 4
    margin = lines[-2].index("└" if braille else "`")
    assert all(len(line) <= max(width, margin + 1 + 10 + len("trials")) for line in lines)
    assert braille or all(line.isascii() for line in lines)


def test_a_falling_curve_falls() -> None:
    lines = plot.text(curve([(0, 100), (50, 50), (100, 0)]), 60, 9, braille=False)[2:11]
    columns = [line.partition("|")[2] or line.partition("+")[2] for line in lines]
    heights = [next(i for i, row in enumerate(columns) if row[x : x + 1] == "*") for x in (0, 20, 40)]
    assert heights == sorted(heights)
    assert columns[0].startswith("*")
    assert columns[4].count("*") > 20
    assert columns[8].rstrip().endswith("*")


@given(st.floats(1e-9, 1e12), st.integers(1, 20), st.booleans())
def test_ticks_are_round_and_reach_the_end(largest: float, count: int, whole: bool) -> None:
    found = plot.ticks(largest, count, whole=whole)
    assert found[0] == 0
    assert found[-1] >= largest * (1 - 1e-6)
    assert len(found) <= count + 2
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-6)
    assert not whole or all(tick == int(tick) for tick in found)


@settings(max_examples=15)
@given(POINTS, st.text(max_size=60))
def test_any_curve_is_drawn(points: list[tuple[float, float]], title: str) -> None:
    marks = tuple(Mark(x=x, y=y, label=title[:20]) for x, y in points[:3])
    drawn = Curve(title=title, x_name="trials", y_name="ms", points=points, marks=marks)
    assert png(drawn).startswith(b"\x89PNG")


def test_several_curves_are_drawn_on_one_sheet() -> None:
    low, high = (Curve(title="t", x_name="x", y_name="y", points=[(0, y), (9, y)]) for y in (1.0, 4.0))
    assert len({png(low, high), png(high), png(low, low, high)}) == 3


@given(st.lists(st.tuples(st.floats(96, 928), st.floats(72, 468)), max_size=30), st.floats(1, 300))
def test_no_label_lies_over_another(dots: list[tuple[float, float]], width: float) -> None:
    places = [place for place in label_places(dots, [width] * len(dots)) if place is not None]
    assert places or not dots
    assert all(x >= 0 and x + width <= WIDTH and 0 <= y <= HEIGHT for x, y in places)
    for (x, y), (other_x, other_y) in itertools.combinations(places, 2):
        assert abs(y - other_y) >= 10 or abs(x - other_x) > width


def test_every_letter_a_model_name_may_hold_can_be_drawn() -> None:
    unknown = list(lettering.strokes("?"))
    for letter in string.ascii_letters + string.digits + "._-":
        strokes = list(lettering.strokes(letter))
        assert strokes != unknown, letter
        assert all(len(stroke) > 1 for stroke in strokes), letter
    assert lettering.width("") == 0
    assert lettering.width("ab") > lettering.width("a") > 0


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(944_600, "944.6 ms"), (804.2, "0.8042 ms"), (1_234_567, "1,235 ms"), (0, "0 ms"), (99_996, "100 ms")],
)
def test_times_have_four_digits_that_count(microseconds: float, text: str) -> None:
    assert milliseconds(microseconds) == text


@given(st.text(), st.integers(1, 40))
def test_long_names_lose_their_middle(name: str, width: int) -> None:
    assert len(short(name, width)) <= max(width, 1)
    assert short("abcdefgh", 5) == "ab…gh"
    assert short("abcde", 5) == "abcde"
