"""What is compiled when nobody asks: one loop, one list of priorities, one rule for trying again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from honed.daemon.idle.leasing import Leasing
from honed.protocol.errors import HonedError

_RETRY_SECONDS = 300.0  # after a failure that says nothing of the model
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """Something to do while the machine is idle. `what` names it in the log, as "compiling m as m@5x7".

    `run` raises HonedError for failures that may pass; then it is tried again later.
    """

    what: str
    run: Callable[[], Awaitable[None]]


class WorkSource(Protocol):
    """A part of the service that has work for idle time."""

    async def tidy(self) -> None:
        """Keep the bounds, whether the machine is idle or not."""

    def background(self) -> Work | None:
        """Return what is to be done next, or None."""


@dataclass(kw_only=True, eq=False)
class Background:
    """The work of `sources` in idle time; those that come first go first.

    Nothing begins while there are `jobs`, by name, that change models.
    """

    leasing: Leasing
    jobs: Collection[str]
    sources: Sequence[WorkSource]
    not_before: dict[int, float] = field(init=False, default_factory=dict)  # by the place of the source

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self.leasing.look_seconds())
            await self.look()

    async def look(self) -> None:
        """Tidy, and do one thing where the machine is idle."""
        for source in self.sources:
            await source.tidy()
        if self.jobs or not self.leasing.idle().idle:
            return
        for place, source in enumerate(self.sources):
            if time.monotonic() < self.not_before.get(place, 0.0):
                continue
            work = source.background()
            if work is not None:
                await self._do(place, work)
                return

    async def _do(self, place: int, work: Work) -> None:
        try:
            await work.run()
        except HonedError as error:
            _log.warning("%s is not done, and is tried again later: %s", work.what, error)
            self.not_before[place] = time.monotonic() + _RETRY_SECONDS
