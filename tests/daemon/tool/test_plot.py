"""Curves in a terminal and as pictures, whatever the numbers."""

from __future__ import annotations

import io
import itertools
import sys
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.runtime.errors import NotFound
from honed.tool.commands.tasks import milliseconds, short
from honed.tool.view import plot
from honed.tool.view.plot import Curve, Mark, draw_picture

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


def drawn(kind: Literal["png", "svg"], one: Curve) -> bytes:
    pytest.importorskip("matplotlib")
    file = io.BytesIO()
    draw_picture(file, kind, one)
    return file.getvalue()


CURVES = [[(0, 0.0)], [(0, 1e9), (10**6, 1.0)], [(3, 5.0), (3, 4.0), (7, 1e-3)]]
TITLES = ["lightglue", "a $ b $ c", "x^{", ""]


@pytest.mark.parametrize(
    ("points", "title"),
    [
        # Each curve and each title once, and at length all pairs
        pytest.param(points, title, marks=[pytest.mark.slow] if points is not CURVES[0] and n else [])
        for points in CURVES
        for n, title in enumerate(TITLES)
    ],
)
def test_any_curve_is_drawn(points: list[tuple[float, float]], title: str) -> None:
    marks = tuple(Mark(x=x, y=y, label=title) for x, y in points)
    one = Curve(title=title, x_name="trials", y_name="ms", points=points, marks=marks)
    assert drawn("png", one).startswith(b"\x89PNG")


def test_a_drawing_for_documents() -> None:
    assert b"<svg" in drawn("svg", curve([(0, 2.0), (9, 1.0)]))


@pytest.mark.parametrize("at", [(0.0, 5.0), (50.0, 0.0), (100.0, 10.0)])
def test_no_label_lies_over_another(at: tuple[float, float]) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    axes = figures.Figure((9.6, 5.4)).subplots()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 10)
    marks = [Mark(x=at[0], y=at[1], label=f"version {n}: 4.03 ms") for n in range(30)]
    boxes = plot.write_labels(axes, marks)
    assert boxes
    assert all(one.x0 >= 0 and one.x1 <= 960 and one.y1 <= 540 for one in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotFound, match="apt install python3-matplotlib"):
        draw_picture(io.BytesIO(), "png", curve([(0, 1.0)]))


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
