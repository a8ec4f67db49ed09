"""Work that ends before its caller goes on, also when that is cancelled; and deadlines of many things."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking `function` in a thread."""
    return await to_its_end(asyncio.to_thread(function, *args, **kwargs))


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; a cancelled caller still waits for its end, and only then is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody waits for it any more
        raise


@asynccontextmanager
async def cleared_in_thread(folder: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter a folder, and remove it afterwards in a thread: freeing gigabytes takes tenths of a second."""
    entered = folder.__enter__()
    try:
        yield entered
    finally:
        await in_thread(folder.__exit__, None, None, None)


# ---- Things that must end in time, with one timer for all: nearly all do, and none
# takes a timer of its own ----

K = TypeVar("K", bound=Hashable)


class DeadlineWatch(Generic[K]):
    """What is under way, by whatever names it. `late` is told of each whose time has passed, once."""

    def __init__(self, late: Callable[[K], None]) -> None:
        self._late = late
        self._ends: dict[K, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, key: K, end: float) -> None:
        """Set the time by which `key` must have ended, replacing any earlier deadline.

        `end` is in monotonic seconds. Call it in a running event loop.
        """
        self._ends[key] = end
        if self._timer is None or end < self._timer.when():
            self._wait_until(end)

    def drop(self, key: K) -> None:
        """Remove the deadline of `key`, which has ended or may take as long as it needs."""
        self._ends.pop(key, None)

    def _wait_until(self, end: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(end, self._passed)

    def _passed(self) -> None:
        self._timer = None
        now = time.monotonic()
        for key in sorted((key for key, end in self._ends.items() if end <= now), key=self._ends.__getitem__):
            if self._ends.pop(key, None) is not None:  # else it was dropped when another was late
                self._late(key)
        if self._ends and self._timer is None:
            self._wait_until(min(self._ends.values()))
