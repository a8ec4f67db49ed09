"""Starts children of an event loop, typed calls to them (`rpc`), and jobs; says when to restart a child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from honed.protocol import strict
from honed.protocol.aiolink import AsyncLink
from honed.protocol.errors import HonedError, InvalidArgument
from honed.protocol.peer import Peer, Progress, ResponseReceived
from honed.protocol.wire import FrameLimits

from .children import FREE, ExitInfo, ResourceLimits, kill_group, start
from .rpc import FRAMES, Call

_LINE = 4 << 20  # Bytes of a line that can be read at once


class Child:
    """A started process. `stdout` is None unless it was requested."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self._ended = ended

    @property
    def running(self) -> bool:
        """Return whether the process has not ended."""
        return not self._ended.done()

    async def wait(self) -> ExitInfo:
        """Return how the process ended, once it has ended."""
        return ExitInfo(status=await asyncio.shield(self._ended))

    async def end(self) -> None:
        """Kill the process with its group, unless it has ended, and wait for the end."""
        if self.running:
            kill_group(self.pid)
        await self.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def spawn(
    program: Sequence[str],
    bounds: ResourceLimits = FREE,
    *,
    pass_fds: Sequence[int] = (),
    stdout: bool = False,
) -> Child:
    """Start a program, with its standard output to read if `stdout`; raise OSError and InvalidArgument.

    A separate thread starts the program and waits for its end, as starting takes long on a busy machine.
    Cancelling this call kills the child.
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
            await child.end()  # Kill it before its pipe is closed, or it would report that
            raise
    return child


class _Starting:
    """A thread that starts a program, waits for its end, and reports both to the loop."""

    def __init__(
        self, program: Sequence[str], bounds: ResourceLimits, pass_fds: Sequence[int], stdout: bool
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[subprocess.Popen[bytes]] = self._loop.create_future()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        given = (program, bounds, pass_fds, subprocess.PIPE if stdout else None)
        threading.Thread(target=self._run, args=given, name="child", daemon=True).start()

    async def process(self) -> subprocess.Popen[bytes]:
        """Wait until the child process has started, and return it.

        Cancelling the awaiting task ends the process with its group.
        """
        try:
            return await asyncio.shield(self._started)
        except asyncio.CancelledError:
            await asyncio.wait([self._started])
            if self._started.exception() is None:
                kill_group(self._started.result().pid)
                await asyncio.wait([self.ended])
            raise

    def _run(
        self, program: Sequence[str], bounds: ResourceLimits, pass_fds: Sequence[int], stdout: int | None
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
        with contextlib.suppress(RuntimeError):  # The loop is closed
            self._loop.call_soon_threadsafe(set_it, value)


# ---- Calls and jobs ----


async def spawn_rpc(
    program: Sequence[str],
    bounds: ResourceLimits = FREE,
    *,
    lost: Callable[[], HonedError],
    frames: FrameLimits = FRAMES,
    large: int | None = None,
) -> tuple[Child, AsyncLink]:
    """Start a child that answers calls; `lost` returns the error of unanswered calls. Raises OSError.

    `large` is that of `FrameDecoder`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        try:
            child = await spawn([*program, str(descriptor)], bounds, pass_fds=[descriptor])
        except BaseException:
            ours.close()
            raise
    peer = Peer(serves=False, receiving=frames, sending=frames, large=large)
    return child, AsyncLink(ours, peer, lost)


def begin(
    link: AsyncLink, call: Call[Any], descriptors: Sequence[int] = (), progress: Progress | None = None
) -> asyncio.Future[ResponseReceived]:
    """Send a call to a child and return the future of its answer; raise the error that broke the link."""
    return link.begin(call.method, strict.to_plain(call), descriptors, progress)


async def run(
    program: Sequence[str],
    hear: Callable[[bytes], None],
    bounds: ResourceLimits = FREE,
    *,
    seconds: float | None,
    started: Callable[[Child], None] = lambda _: None,
) -> ExitInfo:
    """Run a job, passing each line to `hear` as it arrives, and return how it ended.

    Cancelling ends the child, as does a line that is far too long. Raises OSError, and TimeoutError after
    `seconds`.
    """
    child = await spawn(program, bounds, stdout=True)
    assert child.stdout is not None
    try:
        started(child)
        async with asyncio.timeout(seconds):
            while True:
                try:
                    line = await child.stdout.readline()
                except ValueError:  # Too long to read
                    kill_group(child.pid)
                    line = b""
                if not line:
                    return await child.wait()
                hear(line)
    finally:
        await child.end()


# ---- When a child that is kept running is started again ----

HEALTHY_SECONDS = 60.0  # A child that lived longer did not fail at starting
_LONGEST_DELAY_SECONDS = 30.0


class RestartPolicy:
    """The one rule for restarting children that end. It has no clock: its input is seconds.

    Each failure in a row doubles the delay, which is at least `least` seconds. The count restarts after a
    child that lived long. A child that ended at its work is replaced at once: the caller limits work that
    ends children, and other work must not wait for it.
    """

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self._failures = 0  # Failures in a row
        self._ready = True  # The last child became ready, or there was none
        self.failing = False  # The last two children did not become ready

    def delay_after(self, *, lived: float, ready: bool = True, at_work: bool = False) -> float:
        """Return the delay in seconds after a child that lived `lived` seconds; `ready`: it could be used."""
        if ready and at_work:
            self._failures = 0
        elif ready and lived > HEALTHY_SECONDS:
            self._failures = 1
        else:
            self._failures += 1
        self.failing = not (ready or self._ready)
        self._ready = ready
        return max(self._least, restart_delay(self._failures))


def restart_delay(failures: int) -> float:
    """Return the seconds to wait after `failures` in a row: 0, 0.5, 1, 2, ... 30."""
    return 0.0 if failures <= 1 else min(_LONGEST_DELAY_SECONDS, 0.25 * 2.0 ** (failures - 1))
