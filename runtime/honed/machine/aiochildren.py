"""Child processes of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from honed.protocol.errors import InvalidArgument

from .children import FREE, Bounds, Death, kill_group, start

_LINE = 4 << 20  # bytes of a line that can be read at once


class Child:
    """A process that was started. `stdout` is there where it was asked for."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self._ended = ended

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.done()

    async def wait(self) -> Death:
        """How it ended, once it has."""
        return Death(status=await asyncio.shield(self._ended))

    async def end(self) -> None:
        """Kill it with its process group, unless it has ended, and wait for that."""
        if self.running:
            kill_group(self.pid)
        await self.wait()

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def spawn(
    program: Sequence[str], bounds: Bounds = FREE, *, pass_fds: Sequence[int] = (), stdout: bool = False
) -> Child:
    """Start a program, with its standard output to be read if wanted; raises OSError and InvalidArgument.

    A thread of its own starts it and waits for its end: starting takes long on a busy machine. Cancelled,
    this ends what was started.
    """
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()
    ended: asyncio.Future[int] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_it, value)

    def run() -> None:
        try:
            process = start(program, bounds, stdout=subprocess.PIPE if stdout else None, pass_fds=pass_fds)
        except ValueError as error:
            tell(started.set_exception, OSError(str(error)))
        except (OSError, InvalidArgument) as error:
            tell(started.set_exception, error)
        else:
            tell(started.set_result, process)
            tell(ended.set_result, process.wait())

    threading.Thread(target=run, name="child", daemon=True).start()
    try:
        process = await asyncio.shield(started)
    except asyncio.CancelledError:
        await asyncio.wait([started])
        if started.exception() is None:
            kill_group(started.result().pid)
            await asyncio.wait([ended])
        raise
    child = Child(process.pid, ended)
    if process.stdout is not None:
        child.stdout = asyncio.StreamReader(limit=_LINE)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(child.stdout),  # type: ignore[arg-type]
            process.stdout,
        )
    return child
