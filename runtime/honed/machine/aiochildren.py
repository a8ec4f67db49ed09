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
    starting = _Starting(program, bounds, pass_fds, stdout)
    process = await starting.process()
    child = Child(process.pid, starting.ended)
    if process.stdout is not None:
        child.stdout = asyncio.StreamReader(limit=_LINE)
        try:
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(child.stdout),  # type: ignore[arg-type]
                process.stdout,
            )
        except BaseException:
            await child.end()  # killed before its pipe is closed, on which it would speak of that
            raise
    return child


class _Starting:
    """A thread that starts a program and waits for its end, and what it tells the loop."""

    def __init__(self, program: Sequence[str], bounds: Bounds, pass_fds: Sequence[int], stdout: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[subprocess.Popen[bytes]] = self._loop.create_future()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        given = (program, bounds, pass_fds, subprocess.PIPE if stdout else None)
        threading.Thread(target=self._run, args=given, name="child", daemon=True).start()

    async def process(self) -> subprocess.Popen[bytes]:
        """What was started."""
        try:
            return await asyncio.shield(self._started)
        except asyncio.CancelledError:
            await asyncio.wait([self._started])
            if self._started.exception() is None:
                kill_group(self._started.result().pid)
                await asyncio.wait([self.ended])
            raise

    def _run(
        self, program: Sequence[str], bounds: Bounds, pass_fds: Sequence[int], stdout: int | None
    ) -> None:
        try:
            process = start(program, bounds, stdout=stdout, pass_fds=pass_fds)
        except ValueError as error:
            self._tell(self._started.set_exception, OSError(str(error)))
        except (OSError, InvalidArgument) as error:
            self._tell(self._started.set_exception, error)
        else:
            self._tell(self._started.set_result, process)
            self._tell(self.ended.set_result, process.wait())

    def _tell(self, set_it: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(set_it, value)
