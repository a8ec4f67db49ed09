"""Draws a model's curves as SVG: scales, charts, latencies served, and estimates while tuning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from xml.etree.ElementTree import Element

from honed.jobs.events import History
from honed.protocol.results import LatencyPoint, ModelHistory
from honed.tool.commands.tasks import milliseconds
from honed.tool.view.plot import microseconds, number, ticks

from .markup import Ids, day, element

_LOG_FROM = 8.0  # Ratio of the largest to the least value beyond which a scale is logarithmic
# Steps of a time axis, in seconds, which divide a day.
_STEPS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
)  # fmt: skip
_DAY = 86400
_SHORTEST = 120.0  # Minimum length of a time axis in seconds
_TOP, _FIELD, _BOTTOM = 38.0, 150.0, 24.0  # Pixels: for names of marks, the field, and labels of the axis
_WIDE = 1000.0  # Units of the field's width, which is stretched to the page's
_APART = 0.06  # Share of the width that names of marks need
_HEIGHT = _TOP + _FIELD + _BOTTOM
_GAP = 1 / 20  # Share of the time shown, without an inference, over which no line is drawn


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from one value to a larger one; `labels` are rising values and their texts.

    A logarithmic axis has positive values alone.
    """

    begin: float
    end: float
    labels: tuple[tuple[float, str], ...]
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value between 0 and 1; values beyond an end are placed at that end."""
        if self.logarithmic:
            inside = min(self.end, max(self.begin, value))
            return math.log(inside / self.begin) / math.log(self.end / self.begin)
        return min(1.0, max(0.0, (value - self.begin) / (self.end - self.begin)))


def heights(least: float, most: float) -> Scale:
    """Return a scale from 0 to `most`, or a logarithmic one around both if they are far apart."""
    if least > 0 and most > _LOG_FROM * least and math.isfinite(most):
        return _logarithmic(least, most)
    values = ticks(most, 4)
    return Scale(0.0, values[-1], tuple((value, number(value)) for value in values))


def _logarithmic(least: float, most: float) -> Scale:
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    digits = (1, 2, 5) if high - low <= 3 else (1,)
    values = [digit * 10.0**power for power in range(low, high + 1) for digit in digits]
    begin = max(value for value in values if value <= least * (1 + 1e-9))
    end = min((value for value in values if value >= most * (1 - 1e-9)), default=most)
    ticks = [value for value in values if begin <= value <= end]
    return Scale(begin, end, tuple((value, number(value)) for value in ticks), logarithmic=True)


def counts(most: float) -> Scale:
    """Return a scale of whole numbers from 0."""
    values = [value for value in ticks(most, 5, whole=True) if value <= most]
    return Scale(0.0, max(most, 1.0), tuple((value, number(value)) for value in values))


def times(begin: float, end: float) -> Scale:
    """Return a scale of moments in seconds since 1970, labelled in local time.

    If the moments are close, it extends beyond them.
    """
    missing = max(0.0, _SHORTEST - (end - begin)) / 2
    begin, end = begin - missing, end + missing
    return Scale(begin, end, tuple(_moments(begin, end)))


def _moments(begin: float, end: float) -> list[tuple[float, str]]:
    """Return some four to six round moments."""
    span = end - begin
    step = next((step for step in _STEPS if span / step <= 6), None)
    first = datetime.fromtimestamp(begin)
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
    if step is None:
        days = math.ceil(span / _DAY / 6)
        moments = [midnight + timedelta(days=days * n) for n in range(1, 8)]
        form = "%d %b"
    else:
        gone = math.ceil((begin - midnight.timestamp()) / step)
        moments = [midnight + timedelta(seconds=step * (gone + n)) for n in range(8)]
        form = "%H:%M:%S" if step < 60 else "%H:%M" if span < _DAY else "%d %b %H:%M"
    return [(moment.timestamp(), moment.strftime(form)) for moment in moments if moment.timestamp() <= end]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A highlighted point, and its tooltip."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerLine:
    """A line across the field where something began."""

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: lines of (x, y) by rising x, in `steps` or straight; a line of one point is a dot."""

    title: str
    description: str
    x: Scale
    y: Scale
    lines: Sequence[Sequence[tuple[float, float]]]
    steps: bool = False
    dots: Sequence[Dot] = ()
    rules: Sequence[MarkerLine] = ()


def draw(chart: Chart, ids: Ids) -> Element:
    """Return the chart as an element."""
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
    """Yield lines across with their values above them at the left, and the labels of x, kept inside."""
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
    """Yield the marker lines, without the name of one that is close to the one before."""
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


def latency_chart(history: ModelHistory) -> Chart | None:
    """Return a chart of median latencies over time, a line for each version; None without inferences."""
    points = [point for point in history.latency if point.us > 0]
    if not points:
        return None
    least, most = min(point.us for point in points), max(point.us for point in points)
    size, unit = microseconds(most)
    moments = [point.time for point in points]  # The order is not by time if the clock was set back
    begin, end = min(moments), max(moments)
    first, last = points[0].us, points[-1].us
    scale = heights(least / size, most / size)
    return Chart(
        title=f"{unit} an inference, medians{_kind(scale)}",
        description=(
            f"{history.name} took {milliseconds(first)} on {day(begin)} and {milliseconds(last)} on "
            f"{day(points[-1].time)}; between {milliseconds(least)} and {milliseconds(most)}."
        ),
        x=times(begin, end),
        y=scale,
        lines=[
            [(point.time, point.us / size) for point in line] for line in _lines(points, _GAP * (end - begin))
        ],
        rules=[
            MarkerLine(x=point.time, label=f"v{point.version}")
            for before, point in pairwise((None, *points))
            if point is not None and (before is None or before.version != point.version)
        ],
    )


def _lines(points: Sequence[LatencyPoint], gap: float) -> Iterator[list[LatencyPoint]]:
    """Yield runs of points that are of one version and close to each other."""
    line = [points[0]]
    for one, other in pairwise(points):
        if other.version != one.version or not 0 <= other.time - one.time <= gap:
            yield line
            line = []
        line.append(other)
    yield line


def _kind(scale: Scale) -> str:
    return ", logarithmic" if scale.logarithmic else ""


def tuning_chart(model: str, history: History | None) -> Chart | None:
    """Return a chart of the estimated time of one inference over trials; None if nothing was tuned."""
    if history is None or not history.points:
        return None
    measured = [version for version in history.versions if version.us]
    known = [*(point.us for point in history.points), *(version.us or 0 for version in measured)]
    least, most = min(known), max(known)
    size, unit = microseconds(most)
    first, last = history.points[0], history.points[-1]
    points = [(float(point.trials), point.us / size) for point in history.points]
    scale = heights(least / size, most / size)
    return Chart(
        title=f"{unit} an inference over {number(last.trials)} trials{_kind(scale)}",
        description=(
            f"The estimate for {model} fell from {milliseconds(first.us)} on {day(first.time)} to "
            f"{milliseconds(last.us)} on {day(last.time)}, after {last.trials} trials."
        ),
        x=counts(max(last.trials, *(version.trials for version in measured), 1)),
        y=scale,
        lines=[points],
        steps=True,
        dots=[
            Dot(
                x=version.trials,
                y=(version.us or 0) / size,
                text=f"version {version.version}: {milliseconds(version.us or 0)}, {day(version.time)}",
            )
            for version in measured
        ],
    )
