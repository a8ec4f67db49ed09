"""Where values lie on an axis, and which of them are told there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from honed.tool.view.plot import number, ticks

_LOG_FROM = 8.0  # times the least value that the largest is, beyond which a scale is logarithmic
# Seconds that divide a day.
_STEPS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
)  # fmt: skip
_DAY = 86400
_SHORTEST = 120.0  # seconds that an axis of time is long


class Scale(Protocol):
    """An axis: `at` gives the place of a value between 0 and 1, `labels` values and what they are called."""

    def at(self, value: float) -> float:
        """Between 0, where the axis begins, and 1."""

    @property
    def labels(self) -> tuple[tuple[float, str], ...]:
        """Rising."""


@dataclass(frozen=True, slots=True)
class Linear:
    """From one value to a larger one."""

    begin: float
    end: float
    labels: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Its place; what is beyond an end is there."""
        return min(1.0, max(0.0, (value - self.begin) / (self.end - self.begin)))


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """From one positive value to a larger one."""

    begin: float
    end: float
    labels: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Its place; what is beyond an end is there."""
        inside = min(self.end, max(self.begin, value))
        return math.log(inside / self.begin) / math.log(self.end / self.begin)


def heights(least: float, most: float) -> Scale:
    """A scale from 0 to `most`, or a logarithmic one around both where they are far apart."""
    if least > 0 and most > _LOG_FROM * least and math.isfinite(most):
        return _logarithmic(least, most)
    values = ticks(most, 4)
    return Linear(0.0, values[-1], tuple((value, number(value)) for value in values))


def _logarithmic(least: float, most: float) -> Logarithmic:
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    digits = (1, 2, 5) if high - low <= 3 else (1,)
    values = [digit * 10.0**power for power in range(low, high + 1) for digit in digits]
    begin = max(value for value in values if value <= least * (1 + 1e-9))
    end = min((value for value in values if value >= most * (1 - 1e-9)), default=most)
    told = [value for value in values if begin <= value <= end]
    return Logarithmic(begin, end, tuple((value, number(value)) for value in told))


def counts(most: float) -> Linear:
    """A scale of whole numbers from 0."""
    values = [value for value in ticks(most, 5, whole=True) if value <= most]
    return Linear(0.0, max(most, 1.0), tuple((value, number(value)) for value in values))


def times(begin: float, end: float) -> Linear:
    """A scale of moments in seconds since 1970, told in local time; around them where they are close."""
    missing = max(0.0, _SHORTEST - (end - begin)) / 2
    begin, end = begin - missing, end + missing
    return Linear(begin, end, tuple(_moments(begin, end)))


def _moments(begin: float, end: float) -> list[tuple[float, str]]:
    """Some four to six round moments."""
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
