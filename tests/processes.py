"""Processes as tests look at them: any may end between two looks."""

from __future__ import annotations

import contextlib
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
