"""Finds what a Debian package brings along for the compiler alone, which no other program should see."""

from __future__ import annotations

import sys
from pathlib import Path

BUNDLE = Path(__file__).with_name("bundled")


def use() -> None:
    """Let this process import from the bundle, where there is one, before anything of the same name."""
    if BUNDLE.is_dir() and str(BUNDLE) not in sys.path:
        sys.path.insert(0, str(BUNDLE))
