"""Processes as tests look at them, any of which may end between two looks; a socket that is crowded."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil


def running_children(
    word: str = "", *, of: int | None = None, recursive: bool = False
) -> list[psutil.Process]:
    """The children, of this process if no other is given, that run and have the word in their command."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(of).children(recursive=recursive):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                if child.status() != psutil.STATUS_ZOMBIE and word in " ".join(child.cmdline()):
                    found.append(child)
    return found


def has_ended(pid: int) -> bool:
    """Whether it has, though its parent may not know yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


@contextlib.contextmanager
def crowded(path: str) -> Iterator[socket.socket]:
    """A listening socket to which as many have connected as may wait to be accepted."""
    with contextlib.ExitStack() as opened, socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                other = opened.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(path)
        yield server
