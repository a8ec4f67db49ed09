"""What keeps one client from having what is there for all: turns in the event loop, and shares of the memory.

At a stretch only so much time goes to messages, and as much more as none went to them; what is left waits
for the next iteration of the loop, and then processes take turns, whatever the number of their connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable

BUDGET_SECONDS = 0.0002  # At a stretch; a single message may take longer
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
        self._ended = clock()  # The latest work
        self._waiting: dict[Hashable, deque[Work]] = {}  # By owner, whose turn is next first
        self._scheduled = False
        self._running = False

    def ask(self, owner: Hashable, work: Work) -> None:
        """Call `work` when it is the owner's turn, perhaps before this returns."""
        self._waiting.setdefault(owner, deque()).append(work)
        if self._running:
            return
        self._left = min(self._budget, self._left + self._clock() - self._ended)  # Nobody waited meanwhile
        self._run()
        if self._waiting and not self._scheduled:
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
                    self._ended = self._clock()
                    self._left -= self._ended - begun
        finally:
            self._running = False

    def _take(self) -> Work:
        """Take the next work of the owner whose turn it is; that owner is then behind all others."""
        owner = next(iter(self._waiting))
        queue = self._waiting.pop(owner)
        work = queue.popleft()
        if queue:
            self._waiting[owner] = queue
        return work


class Usage:
    """Amounts by user id, with one limit for each user and one for all together (0: none)."""

    def __init__(self, limit: int, in_all: int = 0) -> None:
        self.limit = limit
        self.in_all = in_all
        self._amounts: dict[int, int] = {}
        self._sum = 0

    def change(self, uid: int, amount: int) -> bool:
        """Add `amount` (it may be negative); False where the user is then above the limit."""
        total = self._amounts.get(uid, 0) + amount
        self._sum += amount
        if total:
            self._amounts[uid] = total
        else:
            self._amounts.pop(uid, None)
        return total <= self.limit

    @property
    def overfull(self) -> bool:
        """Whether all users together are above their limit."""
        return bool(self.in_all) and self._sum > self.in_all

    @property
    def largest(self) -> int:
        """The user who holds most; there must be one."""
        return max(self._amounts, key=lambda uid: self._amounts[uid])

    def of(self, uid: int) -> int:
        """Return how much a user holds."""
        return self._amounts.get(uid, 0)
