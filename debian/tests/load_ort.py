"""Runs dense.onnx by ONNX Runtime's interface until SIGTERM, as an app that knows nothing of honed.

Prints how many runs there were, and how long the longest took. A run that fails ends it.
"""

from __future__ import annotations

import signal
import sys
import time

import numpy as np
import onnxruntime


def main() -> int:
    """Every answer must be right."""
    running = True

    def stop(*_: object) -> None:
        nonlocal running
        running = False

    signal.signal(signal.SIGTERM, stop)
    x, want = np.load("x.npy"), np.load("y.npy")
    session = onnxruntime.InferenceSession("dense.onnx", providers=["CPUExecutionProvider"])
    runs, longest = 0, 0.0
    while running:
        begun = time.monotonic()
        (got,) = session.run(None, {"x": x})
        longest = max(longest, time.monotonic() - begun)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * float(np.abs(want).max()))
        runs += 1
        time.sleep(0.01)
    print(f"{runs} runs, all right; {longest:.2f} s at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
