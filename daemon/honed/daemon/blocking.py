"""Work that must end before its caller goes on, also when the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, ParamSpec, TypeVar

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
    """A folder that is removed afterwards in a thread: freeing gigabytes takes tenths of a second."""
    entered = folder.__enter__()
    try:
        yield entered
    finally:
        await in_thread(folder.__exit__, None, None, None)
