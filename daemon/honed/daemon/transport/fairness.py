"""Shares the event loop and memory fairly between clients.

Messages have a budget of time, which refills while none are handled. The rest waits for the next iteration of
the loop. Processes take turns, regardless of the number of their connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable

BUDGET_SECONDS = 0.0002  # Budget of an iteration; a single message may take longer
Work = Callable[[], None]


class RoundRobin:
    """A scheduler of callbacks: at once within the budget, otherwise later, with owners in turn."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        budget: float = BUDGET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._budget = self._left = budget
        self._clock = clock
        self._ended = clock()  # End of the latest work
        self._waiting: dict[Hashable, deque[Work]] = {}  # Work by owner, in the order of turns
        self._scheduled = False
        self._running = False

    def ask(self, owner: Hashable, work: Work) -> None:
        """Call `work` when it is the owner's turn, perhaps before this returns."""
        self._waiting.setdefault(owner, deque()).append(work)
        if not self._running:
            begun = self._clock()
            self._left = min(self._budget, self._left + begun - self._ended)  # The queue was empty
            self._run(begun)

    def _next_iteration(self) -> None:
        self._scheduled = False
        self._left = self._budget
        self._run(self._clock())

    def _run(self, begun: float) -> None:
        self._running = True
        try:
            while self._waiting and self._left > 0:
                try:
                    self._take()()
                finally:
                    self._ended = self._clock()
                    self._left -= self._ended - begun
                    begun = self._ended
        finally:
            self._running = False
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next_iteration)

    def _take(self) -> Work:
        """Remove and return the next work of the first owner, who then becomes the last."""
        owner = next(iter(self._waiting))
        queue = self._waiting.pop(owner)
        work = queue.popleft()
        if queue:
            self._waiting[owner] = queue
        return work


class Usage:
    """The amounts of users by uid, with a limit for each user and one for all together (0: none)."""

    def __init__(self, limit: int, in_all: int = 0) -> None:
        self.limit = limit
        self.in_all = in_all
        self._amounts: dict[int, int] = {}
        self._sum = 0

    def change(self, uid: int, amount: int) -> bool:
        """Add `amount`, which may be negative; return whether the user is within the limit."""
        total = self._amounts.get(uid, 0) + amount
        self._sum += amount
        if total:
            self._amounts[uid] = total
        else:
            self._amounts.pop(uid, None)
        return total <= self.limit

    @property
    def overfull(self) -> bool:
        """Return whether all users together exceed their limit."""
        return bool(self.in_all) and self._sum > self.in_all

    @property
    def largest(self) -> int:
        """The uid of the user with the largest amount; there must be one."""
        return max(self._amounts, key=lambda uid: self._amounts[uid])
