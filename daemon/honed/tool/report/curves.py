"""The curves of a model: what inferences took in service, and what tuning expected of each trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from honed.jobs.events import History
from honed.protocol.results import LatencyPoint, ModelHistory
from honed.tool.commands.tasks import milliseconds
from honed.tool.view.plot import microseconds, number

from .chart import Chart, Dot, Rule
from .scales import Logarithmic, Scale, counts, heights, times
from .words import day

_GAP = 1 / 20  # of the time shown, without an inference, beyond which nothing is drawn


def served(history: ModelHistory) -> Chart | None:
    """Medians of the inferences served over time, a line of each version; None where there were none."""
    points = [point for point in history.latency if point.us > 0]
    if not points:
        return None
    least, most = min(point.us for point in points), max(point.us for point in points)
    size, unit = microseconds(most)
    moments = [point.time for point in points]  # which fall where the clock was set back
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
            Rule(x=point.time, label=f"v{point.version}")
            for before, point in pairwise((None, *points))
            if point is not None and (before is None or before.version != point.version)
        ],
    )


def _lines(points: Sequence[LatencyPoint], gap: float) -> Iterator[list[LatencyPoint]]:
    """Points in a row that are of one version and not far from each other."""
    line = [points[0]]
    for one, other in pairwise(points):
        if other.version != one.version or not 0 <= other.time - one.time <= gap:
            yield line
            line = []
        line.append(other)
    yield line


def _kind(scale: Scale) -> str:
    return ", logarithmic" if isinstance(scale, Logarithmic) else ""


def tuned(model: str, told: History | None) -> Chart | None:
    """The estimated time of one inference over trials; None where nothing was tuned."""
    if told is None or not told.points:
        return None
    measured = [version for version in told.versions if version.us]
    known = [*(point.us for point in told.points), *(version.us or 0 for version in measured)]
    least, most = min(known), max(known)
    size, unit = microseconds(most)
    first, last = told.points[0], told.points[-1]
    points = [(float(point.trials), point.us / size) for point in told.points]
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
