"""Work that ends before its caller goes on, work without tasks, and deadlines of many things."""

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
            task.exception()  # Nobody waits for it any more
        raise


@asynccontextmanager
async def cleared_in_thread(folder: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter a folder, and remove it afterwards in a thread: freeing gigabytes takes tenths of a second."""
    entered = folder.__enter__()
    try:
        yield entered
    finally:
        await in_thread(folder.__exit__, None, None, None)


# ---- An end that one task waits for, and learns of at once: of a future's it learns a turn later ----


class Ending:
    """Something that ends once, well or with an error; the task that awaits it goes on within `end`.

    Where `end` is called by another task, which cannot be interrupted, it goes on in the loop's next turn.
    """

    __slots__ = ("_asyncio_future_blocking", "_error", "_loop", "_waiting", "ended")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asyncio_future_blocking = False
        self._waiting: tuple[Callable[[Any], object], contextvars.Context | None] | None = None
        self._error: BaseException | None = None
        self.ended = False

    def end(self, error: BaseException | None = None, *, later: bool = False) -> None:
        """End it; only the first call counts. `later`: its task goes on in the next turn in any case."""
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

    # What a task asks of what it waits for

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop it belongs to."""
        return self._loop

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Have a callback called at the end."""
        if self.ended:
            self._loop.call_soon(callback, self, context=context)
        else:
            self._waiting = callback, context

    def cancel(self, msg: object = None) -> bool:
        """End it, as its task is cancelled; False where it has ended."""
        if self.ended:
            return False
        self.end(asyncio.CancelledError(), later=True)  # Who cancels may go through its tasks
        return True

    def result(self) -> None:
        """Raise the error that it ended with, if any."""
        if self._error is not None:
            raise self._error


# ---- A coroutine that goes on at once when what it waits for ends: a task goes on a turn later ----


class Driven(Generic[T]):
    """Work that is done without a task, from one callback to the next.

    It may await futures and `Ending`s, and ask for no current task, as `asyncio.timeout` does.
    """

    __slots__ = ("_cancelled", "_done", "_waits", "_work")

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._waits: Any = None  # What it waits for
        self._cancelled = False
        self._done: Callable[[Any, BaseException | None], None] = lambda _, __: None

    def __await__(self) -> Generator[Any, None, T]:
        """Do the work as part of the task that awaits it, in place of `begin`."""
        return self._work.__await__()

    def begin(self, done: Callable[[T | None, BaseException | None], None]) -> None:
        """Do the work; `done` is called once with its result or error, perhaps before this returns."""
        self._done = done
        self._go_on()

    def cancel(self) -> None:
        """Have it end with CancelledError where it waits, unless it has ended."""
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
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 - whatever it is, it is the result
            self._done(None, error)
        else:
            waits._asyncio_future_blocking = False
            self._waits = waits
            waits.add_done_callback(self._go_on)


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
            if self._ends.pop(key, None) is not None:  # Else it was dropped when another was late
                self._late(key)
        if self._ends and self._timer is None:
            self._wait_until(min(self._ends.values()))
