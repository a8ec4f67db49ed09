"""Runs idle-time work: one loop over prioritised sources with one retry rule."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from honed.daemon.feature import Feature
from honed.daemon.idle.leasing import Leasing
from honed.protocol.errors import HonedError

_RETRY_SECONDS = 300.0  # Pause of a source after a failed task
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 60.0, 3600.0
_log = logging.getLogger(__name__)


class Pauses:
    """The pauses between tries of the same work, by name: 60 s, then doubling up to an hour."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, float]] = {}  # Seconds of the last pause, and when it ends

    def over(self, name: str) -> bool:
        """Return whether the work may be tried now."""
        return time.monotonic() >= self._ends.get(name, (0.0, 0.0))[1]

    def begin(self, name: str) -> None:
        """Begin the next pause; call it when the work is tried."""
        pause = min(2 * self._ends.get(name, (_PAUSE_SECONDS / 2, 0.0))[0], _LONGEST_PAUSE_SECONDS)
        self._ends[name] = pause, time.monotonic() + pause

    def forget(self, name: str) -> None:
        """Forget the pauses of a name."""
        self._ends.pop(name, None)


@dataclass(kw_only=True, eq=False)
class Background:
    """The loop of background work; earlier `sources` have priority. `jobs` are models being changed."""

    leasing: Leasing
    jobs: Collection[str]
    sources: Sequence[Feature]
    not_before: dict[int, float] = field(init=False, default_factory=dict)  # Ends of pauses by source

    async def run(self) -> None:
        """Look for work at intervals until cancelled."""
        while True:
            await asyncio.sleep(self.leasing.look_seconds())
            await self.look()

    async def look(self) -> None:
        """Tidy up all sources, and run the first task that one has."""
        for source in self.sources:
            await source.tidy()
        idle = not self.jobs and self.leasing.idle().idle
        for place, source in enumerate(self.sources):
            if time.monotonic() < self.not_before.get(place, 0.0):
                continue
            work = source.background(idle=idle)
            if work is not None:
                try:
                    await work.run()
                except HonedError as error:
                    _log.warning("%s is not done, and is tried again later: %s", work.what, error)
                    self.not_before[place] = time.monotonic() + _RETRY_SECONDS
                return
