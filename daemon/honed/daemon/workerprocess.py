"""A process that runs `honed.daemon.worker`, and the link to it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

from honed.runtime import wire
from honed.runtime.aiolink import AsyncLink
from honed.runtime.errors import HonedError

from . import children
from .children import Child
from .launch import command

# Answers hold the outputs of one inference, which are bounded before it runs (see `inference`).
FRAMES = wire.FrameLimits(max_bytes=1 << 30, max_values=1 << 20)


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
        program = [sys.executable, "-m", "honed.daemon.worker"]
        arguments = [str(theirs.fileno()), str(cache_dir), device]
        try:
            process = await children.spawn(
                command([*program, *arguments], memory_mib=memory_mib, niceness=niceness),
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            ours.close()
            raise
    return process, AsyncLink(ours, limits=FRAMES, large=wire.APART, lost=lost)
