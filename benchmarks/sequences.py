"""Measures what keeping state in the service gains, for a voice detector with its state there and in the app.

python -m benchmarks.sequences [COUNT]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.daemon.running import NO_TUNER, start

VAD = Path(__file__).parents[1] / "tests" / "models" / "silero_vad.onnx"
_WARM_UP = 50


def in_turns(runs: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Return microseconds of each run, the first one alternating."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(count + _WARM_UP):
        order = list(runs.items())
        for name, run in order if number % 2 else order[::-1]:
            begun = time.perf_counter()
            run()
            if number >= _WARM_UP:
                times[name].append((time.perf_counter() - begun) * 1e6)
    return times


def main(count: int) -> None:
    """Print the times of a request in turns, and their ratio."""
    folder = Path(tempfile.mkdtemp())
    service = start(folder / "state", folder / "cache", config='[serve]\nengine = "cpu"\n' + NO_TUNER)
    try:
        with service.client() as client:
            client.add(VAD, name="vad")
            given: dict[str, NDArray[Any]] = {
                "input": np.random.default_rng(0).normal(scale=0.1, size=(1, 576)).astype(np.float32),
                "sr": np.array(16000, np.int64),
            }
            carried: dict[str, NDArray[Any]] = {"state": np.zeros((2, 1, 128), np.float32)}
            with client.sequence("vad") as sequence:

                def in_app() -> None:
                    carried["state"] = client.infer("vad", given | carried)["stateN"]

                times = in_turns(
                    {"in the app": in_app, "in the service": lambda: sequence.infer(given)}, count
                )
        for name, taken in times.items():
            low, middle, high = (np.percentile(taken, share) for share in (5, 50, 95))
            print(f"state {name:15} {middle:7.0f} us, of 90 % {low:.0f} to {high:.0f}")
        service_us, app_us = (statistics.median(times[f"in the {who}"]) for who in ("service", "app"))
        print(f"in the service / in the app: {service_us / app_us:.2f} ({count} requests each, in turns)")
    finally:
        service.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
