"""Measures the time from the arrival of a request until the device is free of tuning, in many interruptions.

A stand-in for the tuner runs real kernels of a stated time under the lease, on the OpenCL device here; an app
interrupts it with real requests at random moments. The service's own figures are printed, with the latency of
the interrupting requests beside that of the same requests without a tuner.

python -m benchmarks.lease [COUNT] [KERNEL_MS] [BOUND_SECONDS]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.daemon.idle.lease_holder import Tuner
from tests.daemon.running import start, wait_for
from tests.runtime.builder import add_constant

from honed.runtime import Client

SIZE = 8  # Elements of the model's input
# Settings by which the machine counts as idle at once, whatever else it does, unless there are requests.
CONFIG = """[idle]
quiet_seconds = 0.0
settle_seconds = 0.0
max_pressure_percent = 1000
max_load_per_core = 1000
max_gpu_percent = 100
max_temperature_c = 1000
on_battery = true
max_candidate_seconds = 10.0
"""


def infer_ms(client: Client) -> float:
    """Return the milliseconds of a request."""
    begun = time.perf_counter()
    client.infer("m", {"x": np.zeros(SIZE, np.float32)})
    return (time.perf_counter() - begun) * 1e3


def lease(client: Client) -> dict[str, Any]:
    """Return what the service says of the lease."""
    part: dict[str, Any] = client.status()["lease"]
    return part


def line(name: str, values: list[float]) -> None:
    """Print the distribution of some values."""
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    print(f"{name:<34} {p50:8.2f} {p90:8.2f} {p99:8.2f} {max(values):8.2f}")


def main(count: int, kernel_ms: float, bound: float) -> int:
    """Print the figures; return 1 if a tuner took longer than its bound."""
    random = np.random.default_rng(0)
    folder = Path(tempfile.mkdtemp())
    service = start(folder / "state", folder / "cache", config=CONFIG)
    try:
        with service.client() as client, Tuner(service.socket, bound, kernel_ms) as tuner:
            client.add(add_constant(SIZE).write(folder / "m.honed"), name="m")
            tuner.hear()
            interrupting = []
            for _ in range(count):
                wait_for(lambda: lease(client)["state"] == "granted", "the tuner to have the lease", service)
                time.sleep(random.uniform(0.0, 2 * kernel_ms / 1e3))
                interrupting.append(infer_ms(client))
            wait_for(lambda: lease(client)["release"]["count"] == count, "the last to be released", service)
            worked = tuner.do("end")
            left = lease(client)["release"]
            alone = [infer_ms(client) for _ in range(count)]
    finally:
        service.stop()
    print(
        f"{left['count']} interruptions of {worked['kernels']} kernels of {kernel_ms:g} ms (the longest took "
        f"{worked['longest_ms']:.1f} ms); bound {bound * 1e3:g} ms"
    )
    print(
        f"arrival to free, ms: p50 {left['p50_ms']:.2f}, p99 {left['p99_ms']:.2f}, most {left['max_ms']:.2f}"
    )
    for before, bucket in zip([{"count": 0}, *left["buckets"]], left["buckets"], strict=False):
        share = (bucket["count"] - before["count"]) / left["count"]
        end = "more" if bucket["le_seconds"] is None else f"{bucket['le_seconds'] * 1e3:g}"
        if share:
            print(f"  to {end:>6} ms {share:7.1%} {'#' * round(60 * share)}")
    print(f"{'request, ms':<34} {'p50':>8} {'p90':>8} {'p99':>8} {'most':>8}")
    line("that interrupts the tuner", interrupting)
    line("the same without a tuner", alone)
    print(f"worst over bound: {left['max_ms'] / bound / 1e3:.3f}")
    return int(left["max_ms"] > bound * 1e3)


if __name__ == "__main__":
    given = [float(argument) for argument in sys.argv[1:]]
    chosen = given + [1000.0, 20.0, 0.25][len(given) :]
    sys.exit(main(int(chosen[0]), chosen[1], chosen[2]))
