"""Child processes started through `launch`: how they are started and ended, and what ended them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

# What ends a process that somebody else ends, or that memory runs out for.
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_LINE = 4 << 20  # bytes of a line that can be read at once
# A parent that used vfork stands still, all of its threads with it, until the child got a processor.
setattr(subprocess, "_USE_VFORK", False)  # noqa: B010 - documented, and typed as if it could not be set


class Child:
    """A process that was started. `stdout` is there where it was asked for."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        """Its exit status as `subprocess` gives it; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def spawn(command: Sequence[str], *, pass_fds: Sequence[int] = (), stdout: bool = False) -> Child:
    """Start a process, with its standard output to be read if wanted; raises OSError.

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
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if stdout else None,
                pass_fds=tuple(pass_fds),
            )
        except (OSError, ValueError) as error:
            tell(started.set_exception, error if isinstance(error, OSError) else OSError(str(error)))
            return
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


def kill_group(pid: int) -> None:
    """Kill a child of `launch` with its process group; one that is gone already is fine."""
    for kill in (os.killpg, os.kill):  # the group is not there yet in a child's first moments
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """What ended a process, from its exit status as Python gives it."""
    if status < 0:
        return f"it was ended by signal {signal.Signals(-status).name}"
    return f"it ended with status {status}"
