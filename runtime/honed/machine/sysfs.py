"""Reads small files of /proc and /sys: what cannot be read is None, whatever the reason.

There are many reasons (not there, not permitted, driver suspended, device unplugged meanwhile) and one
answer to all: this machine does not show that signal now.
"""

from __future__ import annotations

import os
from pathlib import Path

_MAX_BYTES = 64 << 10


def read(file: Path) -> str | None:
    """The text of a file without the white space around it."""
    try:
        with file.open("rb") as stream:
            return stream.read(_MAX_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


def number(file: Path) -> int | None:
    """The whole number a file holds."""
    text = read(file)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name."""
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except OSError:
        return []


def gpu_clocks(root: Path) -> list[Path]:
    """The folders of GPUs in devfreq, which scales their clocks; `root` is that of the system."""
    folders = entries(root / "sys/class/devfreq")
    return [folder for folder in folders if "gpu" in folder.name or "mali" in folder.name]
