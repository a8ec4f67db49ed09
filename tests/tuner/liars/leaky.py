"""A measuring child whose driver leaks 32 MiB with every program: drivers do leak, less at a time."""

from __future__ import annotations

import sys
from typing import Any

from honed.tuner.measure import child, timing

COMMAND = (sys.executable, "-m", "tests.tuner.liars.leaky")
_leaked: list[bytearray] = []
_build = timing.build


def build(context: Any, source: str) -> Any:
    """Build it, and keep memory for nothing."""
    _leaked.append(bytearray(b"x") * (32 << 20))
    return _build(context, source)


if __name__ == "__main__":
    timing.build = build
    child.main()
