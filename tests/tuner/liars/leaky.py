"""A measuring child whose driver leaks 32 MiB with every program: drivers do leak, less at a time."""

from __future__ import annotations

import sys
from typing import Any

from honed.tuner.measure import bound, child

COMMAND = (sys.executable, "-m", "tests.tuner.liars.leaky")
_leaked: list[bytearray] = []
_build = bound.build


def build(context: Any, source: str) -> Any:
    """Build it, and keep memory for nothing."""
    _leaked.append(bytearray(b"x") * (32 << 20))
    return _build(context, source)


if __name__ == "__main__":
    bound.build = build
    child.main()
