"""Calls the model "dense" until SIGTERM, connecting again when the service goes; fails if it stays away.

Prints how many calls there were, how many failed, and the longest time without an answer.
"""

from __future__ import annotations

import signal
import sys
import time

import numpy as np

from honed.runtime import Client
from honed.runtime.errors import Unavailable

PATIENCE = 60.0  # seconds without an answer


def main() -> int:
    """Every answer that comes must be right."""
    running = True

    def stop(*_: object) -> None:
        nonlocal running
        running = False

    signal.signal(signal.SIGTERM, stop)
    x, want = np.load("x.npy"), np.load("y.npy")
    calls = lost = 0
    last, longest = time.monotonic(), 0.0
    while running:
        try:
            with Client() as client:
                while running:
                    got = client.infer("dense", {"x": x}, timeout=30)["y"]
                    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * float(np.abs(want).max()))
                    calls += 1
                    now = time.monotonic()
                    longest, last = max(longest, now - last), now
        except Unavailable as error:
            lost += 1
            if time.monotonic() - last > PATIENCE:
                print(f"not served for {PATIENCE:g} s: {error}", file=sys.stderr)
                return 1
            time.sleep(0.02)
    print(f"{calls} calls, all right; {lost} failed and were repeated; {longest:.2f} s at most between two")
    return 0


if __name__ == "__main__":
    sys.exit(main())
