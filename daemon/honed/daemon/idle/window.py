"""The times of day at which tuning is allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from honed.protocol.errors import InvalidArgument

_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class TimeOfDayWindow:
    """From `start` until before `end`, in minutes after midnight of local time; it may cross midnight."""

    start: int
    end: int

    def holds(self, minute: int) -> bool:
        """Whether a minute of the day (0 to 1439) lies in it."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


def parse(text: str) -> TimeOfDayWindow | None:
    """`22:00-06:30` as a window, "" as None: any time. Raises InvalidArgument, a half sentence for others."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    times = [_TIME.fullmatch(part.strip()) for part in (first, last)]
    if not dash or None in times:
        raise InvalidArgument('give two times of day as "22:00-06:30", or "" for any time')
    start, end = (int(time[1]) * 60 + int(time[2]) for time in times if time)
    if start == end:
        raise InvalidArgument('give two times that differ as "22:00-06:30", or "" for any time')
    return TimeOfDayWindow(start, end)


def clock_text(minute: int) -> str:
    """A minute of the day as `06:30`."""
    return f"{minute // 60:02d}:{minute % 60:02d}"
