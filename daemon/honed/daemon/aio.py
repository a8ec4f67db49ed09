"""Provides work that outlives the cancellation of its caller, work without tasks, and deadlines."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Hashable
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
            task.exception()  # Marks the error as retrieved
        raise


async def cancel_all(*works: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended; raise none of their errors."""
    for work in works:
        work.cancel()
    if works:
        await asyncio.wait(works)


@asynccontextmanager
async def clearing_in_thread(folder: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter a folder, and remove it afterwards in a thread: freeing gigabytes takes tenths of a second."""
    entered = folder.__enter__()
    try:
        yield entered
    finally:
        await in_thread(folder.__exit__, None, None, None)


def expire(waiting: asyncio.Future[Any], error: Exception) -> None:
    """Fail a future whose time is over, unless it is done."""
    if not waiting.done():
        waiting.set_exception(error)


# ---- An awaitable end, whose task continues at once; with a future it continues a turn later ----


class Ending:
    """An awaitable that ends once, with or without an error; the task that awaits it continues within `end`.

    If another task calls `end`, it continues in the loop's next turn, as tasks cannot be nested.
    """

    __slots__ = ("_asyncio_future_blocking", "_error", "_loop", "_waiting", "ended")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        self._waiting: tuple[Callable[[Any], object], contextvars.Context | None] | None = None
        self._error: BaseException | None = None
        self.ended = False

    def end(self, error: BaseException | None = None, *, later: bool = False) -> None:
        """End it; only the first call counts. With `later` its task continues in the next turn."""
        if self.ended:
            return
        self.ended, self._error = True, error
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        callback, context = waiting
        if later or asyncio.current_task(self._loop) is not None:
            self._loop.call_soon(callback, self, context=context)
        elif context is not None:
            context.run(callback, self)
        else:
            callback(self)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait for the end; raise its error."""
        if not self.ended:
            self._asyncio_future_blocking = True
            yield self
        self.result()

    # The interface of futures that tasks use

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the object."""
        return self._loop

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Register the callback for the end."""
        if self.ended:
            self._loop.call_soon(callback, self, context=context)
        else:
            self._waiting = callback, context

    def cancel(self, msg: object = None) -> bool:
        """End it with CancelledError; return False if it has ended."""
        if self.ended:
            return False
        self.end(asyncio.CancelledError(), later=True)  # The caller may be iterating over its tasks
        return True

    def result(self) -> None:
        """Raise the error that it ended with, if any."""
        if self._error is not None:
            raise self._error


# ---- A coroutine that continues at once when an awaited object ends; a task continues a turn later ----


class Driven(Generic[T]):
    """A coroutine that runs without a task, from one callback to the next.

    It may await futures and `Ending`s, but not use the current task, as `asyncio.timeout` does.
    """

    __slots__ = ("_cancelled", "_done", "_waits", "_work")

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._waits: Any = None  # The awaited object
        self._cancelled = False
        self._done: Callable[[Any, BaseException | None], None] = lambda _, __: None

    def __await__(self) -> Generator[Any, None, T]:
        """Run the coroutine within the awaiting task, instead of `begin`."""
        return self._work.__await__()

    def begin(self, done: Callable[[T | None, BaseException | None], None]) -> None:
        """Start the coroutine; `done` receives its result or error, perhaps before this returns."""
        self._done = done
        self._go_on()

    def cancel(self) -> None:
        """Raise CancelledError in the coroutine where it waits, unless it has ended."""
        if self._waits is not None and not self._waits.cancel():
            self._cancelled = True

    def _go_on(self, _: object = None) -> None:
        self._waits = None
        try:
            if self._cancelled:
                self._cancelled = False
                waits = self._work.throw(asyncio.CancelledError())
            else:
                waits = self._work.send(None)
        except StopIteration as end:
            self._done(end.value, None)
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 - any error is the result
            self._done(None, error)
        else:
            waits._asyncio_future_blocking = False
            self._waits = waits
            waits.add_done_callback(self._go_on)


# ---- Deadlines that share a timer: nearly all end in time, so none needs its own ----

K = TypeVar("K", bound=Hashable)


class DeadlineWatch(Generic[K]):
    """The deadlines of keys; `late` is called once for each key whose deadline has passed."""

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
        self._timer = asyncio.get_running_loop().call_at(end, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = time.monotonic()
        for key in sorted((key for key, end in self._ends.items() if end <= now), key=self._ends.__getitem__):
            if self._ends.pop(key, None) is not None:  # An earlier call of `late` may have dropped it
                self._late(key)
        if self._ends and self._timer is None:
            self._wait_until(min(self._ends.values()))
