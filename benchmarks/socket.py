"""Measures the cost of the socket: inferences through the service against the same executor in this process.

python -m benchmarks.socket [COUNT]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.daemon.running import start
from tests.runtime.builder import add_constant

from honed.runtime import load

SIZES = (8, 65_536, 1_000_000)  # Elements of the input and of the output


def median_us(call: Callable[[], object], count: int) -> float:
    """Return the median time of `count` calls in microseconds."""
    for _ in range(count // 5 + 1):
        call()
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def main(count: int) -> None:
    """Print a table; times are medians in microseconds."""
    folder = Path(tempfile.mkdtemp())
    service = start(folder / "state", folder / "cache")
    try:
        with service.client() as client:
            print(f"a call that does nothing: {median_us(client.live, count):.0f} us")
            print(f"{'bytes':>10} {'executor':>9} {'inline':>9} {'shared':>9}  inline/executor")
            for size in SIZES:
                path = add_constant(size).write(folder / "m.honed")
                client.add(path, name="m", replace=True)
                x = np.zeros(size, np.float32)
                rounds = max(20, count // (1 + size // 50_000))
                with load(path) as executor, client.region(8 * size + 4096) as region:
                    alone = median_us(lambda e=executor, a=x: e.run({"x": a}), rounds)  # type: ignore[misc]
                    inline = median_us(lambda a=x: client.infer("m", {"x": a}), rounds)  # type: ignore[misc]
                    a, b = region.array("float32", (size,)), region.array("float32", (size,))
                    shared = median_us(
                        lambda a=a, b=b: client.infer("m", {"x": a}, outputs={"y": b}),  # type: ignore[misc]
                        rounds,
                    )
                print(f"{4 * size:>10} {alone:>9.0f} {inline:>9.0f} {shared:>9.0f}  {inline / alone:.2f}")
    finally:
        service.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
