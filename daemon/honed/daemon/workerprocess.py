"""A process that runs `honed.daemon.worker`, and the link to it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from honed.machine import aiochildren
from honed.machine.aiochildren import Child
from honed.machine.children import Bounds, python
from honed.protocol.errors import HonedError
from honed.protocol.peer import Peer
from honed.protocol.wire import APART, FrameLimits
from honed.runtime.aiolink import AsyncLink

# Answers hold the outputs of one inference, which are bounded before it runs (see `inference`).
FRAMES = FrameLimits(max_bytes=1 << 30, max_values=1 << 20)


async def spawn(
    cache_dir: Path,
    device: str,
    lost: Callable[[], HonedError],
    *,
    memory_mib: int,
    niceness: int = 0,
) -> tuple[Child, AsyncLink]:
    """Start a worker for `device`; `lost` makes the error of calls cut short. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        program = python("honed.daemon.worker", str(theirs.fileno()), str(cache_dir), device)
        bounds = Bounds(memory_mib=memory_mib, niceness=niceness)
        try:
            process = await aiochildren.spawn(program, bounds, pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise
    peer = Peer(serves=False, receiving=FRAMES, sending=FRAMES, large=APART)
    return process, AsyncLink(ours, peer, lost=lost)
