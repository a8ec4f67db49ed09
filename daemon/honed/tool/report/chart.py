"""A curve as SVG in a page: as wide as there is room, its letters the same size everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from .markup import Ids, element
from .scales import Scale

_TOP, _FIELD, _BOTTOM = 38.0, 150.0, 24.0  # pixels: for names of marks, the field, and names of places
_WIDE = 1000.0  # units of the field's width, which is stretched to what there is
_APART = 0.06  # of the width, that names of marks need
_HEIGHT = _TOP + _FIELD + _BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point that stands out, and what is told where it is pointed at."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A line across the field where something began."""

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn: lines of (x, y) by rising x, in `steps` or straight; one of a single point is a dot."""

    title: str
    description: str
    x: Scale
    y: Scale
    lines: Sequence[Sequence[tuple[float, float]]]
    steps: bool = False
    dots: Sequence[Dot] = ()
    rules: Sequence[Rule] = ()


def drawn(chart: Chart, ids: Ids) -> Element:
    """The chart."""
    title, text = ids.new("chart"), ids.new("chart")
    return element(
        "svg",
        element("title", chart.title, id=title),
        element("desc", chart.description, id=text),
        *_grid(chart),
        *_rules(chart),
        element(
            "svg",
            *(_line(chart, points) for points in chart.lines if len(points) > 1),
            y=_TOP,
            width="100%",
            height=_FIELD,
            viewBox=f"0 0 {_WIDE:.0f} {_FIELD:.0f}",
            preserveAspectRatio="none",
            overflow="visible",
        ),
        *_dots(chart),
        class_="chart",
        role="img",
        aria_labelledby=f"{title} {text}",
        width="100%",
        height=_HEIGHT,
    )


def _grid(chart: Chart) -> Iterator[Element]:
    """Lines across, their values above them at the left; places below, the outermost kept inside."""
    for value, label in chart.y.labels:
        y = _height(chart, value)
        yield element("line", x1=0, x2="100%", y1=y, y2=y, class_="grid")
        yield element("text", label, x=0, y=y - 4, class_="halo")
    last = -1.0
    for value, label in chart.x.labels:
        at = chart.x.at(value)
        if at - last < 1.4 * _APART:
            continue
        anchor = "start" if at < _APART else "end" if at > 1 - _APART else "middle"
        yield element("text", label, x=_percent(at), y=_HEIGHT - 6, text_anchor=anchor)
        last = at


def _rules(chart: Chart) -> Iterator[Element]:
    """The name of one that is close behind another is left out."""
    last = -1.0
    for rule in chart.rules:
        at = chart.x.at(rule.x)
        x = _percent(at)
        yield element(
            "line", element("title", rule.label), x1=x, x2=x, y1=_TOP - 22, y2=_TOP + _FIELD, class_="rule"
        )
        if at - last >= _APART:
            end = at > 1 - _APART
            yield element(
                "text", rule.label, x=x, y=_TOP - 26, text_anchor="end" if end else "start", class_="mark"
            )
            last = at


def _line(chart: Chart, points: Sequence[tuple[float, float]]) -> Element:
    places = [(_WIDE * chart.x.at(x), _height(chart, y) - _TOP) for x, y in points]
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for (_, _), (x, y) in pairwise(places):
        path += f"H{x:.1f}V{y:.1f}" if chart.steps else f"L{x:.1f} {y:.1f}"
    return element("path", d=path, class_="curve", vector_effect="non-scaling-stroke")


def _dots(chart: Chart) -> Iterator[Element]:
    for ((x, y),) in (points for points in chart.lines if len(points) == 1):
        yield element("circle", cx=_percent(chart.x.at(x)), cy=_height(chart, y), r=2.5, class_="lone")
    for dot in chart.dots:
        cx, cy = _percent(chart.x.at(dot.x)), _height(chart, dot.y)
        yield element("circle", element("title", dot.text), cx=cx, cy=cy, r=4, class_="dot")


def _height(chart: Chart, value: float) -> float:
    return round(_TOP + _FIELD * (1 - chart.y.at(value)), 1)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
