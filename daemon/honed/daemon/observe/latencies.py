"""Records the latency of each model over time: the curve that shows whether tuning helped.

A point is the median of a span of time under one version. Spans are ten seconds at first. Beyond POINTS,
neighbours of one version are merged, so that an old curve stays small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from honed.protocol.results import LatencyPoint

from .statefile import StateFile, save_at_intervals

SPAN_SECONDS = 10.0
POINTS = 720
_SAMPLES = 1000  # Maximum samples of a span for its median


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The stored curves by model."""

    models: dict[str, tuple[LatencyPoint, ...]]


@dataclass(slots=True)
class _Series:
    points: list[LatencyPoint] = field(default_factory=list)
    began: float = 0.0
    version: int = 0
    count: int = 0
    samples: list[float] = field(default_factory=list)

    def all(self) -> tuple[LatencyPoint, ...]:
        """Return the points of the ended spans, and of the current one."""
        if not self.count:
            return tuple(self.points)
        us = sorted(self.samples)[len(self.samples) // 2]
        return (*self.points, LatencyPoint(time=self.began, version=self.version, count=self.count, us=us))

    def close(self) -> None:
        """End the current span."""
        self.points = thin(list(self.all()))
        self.count = 0
        self.samples.clear()


class Latencies:
    """The latency curves of all models."""

    def __init__(self, kept: Curves | None = None) -> None:
        models = kept.models if kept else {}
        self._series = {name: _Series(points=list(points)) for name, points in models.items()}
        self.noted = 0  # Number of changes

    def note(self, model: str, version: int, seconds: float, now: float) -> None:
        """Record that an inference took `seconds` in the worker.

        `now` is in seconds since 1970; that clock may be set back.
        """
        self.noted += 1
        if (series := self._series.get(model)) is None:
            series = self._series[model] = _Series()
        if series.count and (version != series.version or not 0 <= now - series.began < SPAN_SECONDS):
            series.close()
        if not series.count:
            series.began, series.version = now, version
        series.count += 1
        if len(series.samples) < _SAMPLES:
            series.samples.append(seconds * 1e6)

    def of(self, model: str) -> tuple[LatencyPoint, ...]:
        """Return the points of a model, oldest first, including the current span."""
        series = self._series.get(model)
        return series.all() if series is not None else ()

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self.noted += 1
        self._series.pop(model, None)

    def curves(self) -> Curves:
        """Return all curves, to be stored."""
        return Curves(models={name: series.all() for name, series in self._series.items()})


def thin(points: list[LatencyPoint]) -> list[LatencyPoint]:
    """Thin points out to at most POINTS.

    In the older half, neighbours of one version merge; otherwise the oldest are dropped.
    """
    if len(points) <= POINTS:
        return points
    half = len(points) // 2
    older: list[LatencyPoint] = []
    merged = False  # The last of the older points is two already
    for point in points[:half]:
        merged = not merged and bool(older) and older[-1].version == point.version
        older.append(_merge(older.pop(), point) if merged else point)
    return [*older, *points[half:]][-POINTS:]


def _merge(one: LatencyPoint, other: LatencyPoint) -> LatencyPoint:
    count = one.count + other.count
    us = (one.us * one.count + other.us * other.count) / count
    return LatencyPoint(time=one.time, version=other.version, count=count, us=us)


class Keeper:
    """A keeper of curves in a file, which outlasts the service."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, Curves, "the latency curves")
        self._saved = 0  # Inferences noted when the curves were saved last
        self.latencies = Latencies(self._file.read())

    async def keep(self) -> None:
        """Save at intervals, and when cancelled."""
        await save_at_intervals(self.save)

    async def save(self) -> None:
        """Write the curves if they have changed since the last write."""
        noted = self.latencies.noted
        await self._file.save(self.latencies.curves() if noted != self._saved else None)
        self._saved = noted
