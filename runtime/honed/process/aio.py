"""The parent's end of typed calls (`rpc`), and of jobs (`job`), in an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

from honed.machine import aiochildren
from honed.machine.aiochildren import Child
from honed.machine.children import FREE, Bounds, Death, kill_group
from honed.protocol import strict
from honed.protocol.aiolink import AsyncLink
from honed.protocol.errors import HonedError
from honed.protocol.peer import Peer, ResponseReceived
from honed.protocol.streams import Progress
from honed.protocol.wire import FrameLimits, close_all

from .rpc import FRAMES, Call, R


async def spawn(
    program: Sequence[str],
    bounds: Bounds = FREE,
    *,
    lost: Callable[[], HonedError],
    frames: FrameLimits = FRAMES,
    large: int | None = None,
) -> tuple[Child, AsyncLink]:
    """Start a child that answers calls; `lost` makes the error of those cut short. Raises OSError.

    `large` is that of `Decoder`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        try:
            child = await aiochildren.spawn([*program, str(descriptor)], bounds, pass_fds=[descriptor])
        except BaseException:
            ours.close()
            raise
    peer = Peer(serves=False, receiving=frames, sending=frames, large=large)
    return child, AsyncLink(ours, peer, lost)


def begin(
    link: AsyncLink, call: Call[Any], descriptors: Sequence[int] = (), progress: Progress | None = None
) -> asyncio.Future[ResponseReceived]:
    """Send a call to a child and return its answer to come; raise the error that the link failed with."""
    return link.begin(call.method, strict.to_plain(call), descriptors, progress)


def taken(call: Call[R], answered: ResponseReceived) -> R:
    """Return the child's answer to a call; close descriptors that came with it."""
    close_all(answered.descriptors)
    return strict.from_plain(call.answer(), answered.result, where=call.method)


async def run(
    program: Sequence[str],
    hear: Callable[[bytes], None],
    bounds: Bounds = FREE,
    *,
    seconds: float | None,
    started: Callable[[Child], None] = lambda _: None,
) -> Death:
    """Run a job, with its lines given to `hear` as they come, and tell how it ended.

    Cancelling ends the child, as does a line that is far too long. Raises OSError, and TimeoutError after
    `seconds`.
    """
    child = await aiochildren.spawn(program, bounds, stdout=True)
    assert child.stdout is not None
    try:
        started(child)
        async with asyncio.timeout(seconds):
            while True:
                try:
                    line = await child.stdout.readline()
                except ValueError:  # longer than can be read
                    kill_group(child.pid)
                    line = b""
                if not line:
                    return await child.wait()
                hear(line)
    finally:
        await child.end()
