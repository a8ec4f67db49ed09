"""What a device could do at best, which rises with what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from honed.machine import bounds
from honed.machine.profile import DevicePeaks, DeviceProfile

from .task import TaskProgress, TuningTask

_PEAKS_SECONDS = 60.0  # between two measurements of the device's peaks


class Rooflines:
    """Of tasks, by the device's peaks. These were measured once, and the machine may have been busy then."""

    def __init__(self, profile: DeviceProfile, again: Callable[[], DeviceProfile]) -> None:
        """`profile` has measured peaks, `again` measures them anew."""
        self.profile = profile
        self.rates: dict[str, float] = {}  # bytes per second by task
        self._again = again
        self._measured_at = float("-inf")

    def of(self, task: TuningTask) -> float:
        """Seconds that the task takes at least."""
        assert self.profile.peaks is not None
        return task.roofline(self.profile.peaks, self.rates.get(task.key, 0.0))

    def note(self, progress: TaskProgress, rate: float) -> None:
        """The device was seen to move so many bytes per second at a task's size."""
        self.rates[progress.task.key] = rate
        progress.roofline = self.of(progress.task)

    def take(self, found: DevicePeaks, tasks: Iterable[TaskProgress]) -> None:
        """Draw the rooflines anew where some figure is higher than was known."""
        assert self.profile.peaks is not None
        peaks = bounds.higher(self.profile.peaks, found)
        if peaks == self.profile.peaks:
            return
        self.profile = replace(self.profile, peaks=peaks)
        for p in tasks:
            if not p.task.opaque:
                p.roofline = self.of(p.task)

    def doubted(self, tasks: Iterable[TaskProgress]) -> bool:
        """Whether some task comes so near to the peaks, or beyond, that they are worth measuring again."""
        return any(p.beyond for p in tasks) and time.monotonic() - self._measured_at >= _PEAKS_SECONDS

    def measure_again(self, tasks: Iterable[TaskProgress]) -> None:
        """Take the peaks as they are measured now, where they are higher."""
        self._measured_at = time.monotonic()
        measured = self._again().peaks
        assert measured is not None
        self.take(measured, tasks)
