"""A measuring child whose driver aborts while it builds a program, injected: drivers that do that for
some source or other are not at hand everywhere. Everything but the call of the driver is the real child.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from honed.tuner.measure import child, timing

MARK = "// abort here"
COMMAND = (sys.executable, "-m", "tests.tuner.liars.compiler_abort")
_build = timing.build


def build(context: Any, source: str) -> Any:
    """Print what a compiler might, and die of it, over sources that ask for it."""
    if MARK in source:
        os.write(2, b"LLVM ERROR: Cannot select: intrinsic %llvm.honed\n")
        os.abort()
    return _build(context, source)


if __name__ == "__main__":
    timing.build = build
    child.main()
