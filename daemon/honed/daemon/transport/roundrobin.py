"""Whose messages are handled next, so that many clients at once do not hold up the event loop.

In one iteration of the loop only so much time goes to messages; what is left waits for the next, and then
processes take turns, whatever the number of their connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable

BUDGET_SECONDS = 0.0002  # of one iteration; a single message may take longer
Work = Callable[[], None]


class RoundRobin:
    """Calls what it is asked to: at once while there is time, else later, owner by owner."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        budget: float = BUDGET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._budget = self._left = budget
        self._clock = clock
        self._waiting: dict[Hashable, deque[Work]] = {}  # by owner, whose turn is next first
        self._scheduled = False
        self._running = False

    def ask(self, owner: Hashable, work: Work) -> None:
        """Call `work` when it is the owner's turn, perhaps before this returns."""
        self._waiting.setdefault(owner, deque()).append(work)
        if not self._running:
            self._run()
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._scheduled = False
        self._left = self._budget
        self._run()
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next_iteration)

    def _run(self) -> None:
        self._running = True
        try:
            while self._waiting and self._left > 0:
                begun = self._clock()
                try:
                    self._take()()
                finally:
                    self._left -= self._clock() - begun
        finally:
            self._running = False

    def _take(self) -> Work:
        """The next one of the owner whose turn it is, who is then behind all others."""
        owner = next(iter(self._waiting))
        queue = self._waiting.pop(owner)
        work = queue.popleft()
        if queue:
            self._waiting[owner] = queue
        return work
