"""Ends each program in Python: uses it once, and once more for each line of standard input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def take_turns(use: Callable[[], Any], begun: float | None = None) -> None:
    """Print what each use finds, and how many milliseconds it takes; the first one's since `begun`."""
    while True:
        begun = time.perf_counter() if begun is None else begun
        found = use()
        print(json.dumps({"found": found, "ms": (time.perf_counter() - begun) * 1e3}), flush=True)
        begun = None
        if not sys.stdin.readline():
            return
