"""Times the phases of a measurement, and its cost beyond compiling and running the kernel.

    python -m benchmarks.measure [--device SPEC] [-n 10]

For each kernel: its time, then milliseconds by phase of a measurement (medians over -n). Some drivers
compile at the first launch: "first" holds that. "overhead" is all but "build" and "first".
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.tuner.liars import honest

from honed.machine import devices, peaks
from honed.tuner.measure.measurer import Measurer

_PHASES = ("build", "first", "host", "run", "time")


def main() -> None:
    """Measure the kernels, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device")
    parser.add_argument("-n", type=int, default=10)
    options = parser.parse_args()
    device = devices.select(options.device)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        profile = peaks.load_or_measure(device, folder)
        scale, large = honest.scale(place / "scale"), honest.scale(place / "large", 1 << 20)
        dense = honest.dense(place / "dense", 192, 256, 64)
        cases = (
            ("scale 4096", scale, honest.SCALE, 4096 // 64),
            ("scale 1M", large, honest.SCALE, (1 << 20) // 64),
            ("dense 192x256x64", dense, honest.dense_source(256, 64), 192 * 256 // 64),
        )
        print(
            f"{'':18}{'kernel us':>10}{'+-%':>6}{'n':>4}",
            *(f"{name:>8}" for name in (*_PHASES, "whole", "overhead")),
        )
        with Measurer(device.spec, profile) as measurer:
            for name, workload, source, groups in cases:
                measurer.load(workload)
                rows, timing = [], None
                for number in range(options.n):
                    made = honest.candidate(workload, f"{source}// {number}\n", groups=groups)
                    verdict = measurer.measure(made)
                    timing = verdict.timing
                    if timing is None:
                        raise SystemExit(f"{name}: {verdict.reason}")
                    spent = [measurer.spent.get(phase, 0.0) for phase in _PHASES]
                    rows.append([*spent, verdict.seconds, verdict.seconds - spent[0] - spent[1]])
                assert timing is not None
                half = max(timing.high_s - timing.median_s, timing.median_s - timing.low_s) / timing.median_s
                medians = [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]
                print(
                    f"{name:18}{timing.median_s * 1e6:10.1f}{half * 100:6.1f}{timing.repeats:4}",
                    *(f"{value:8.1f}" for value in medians),
                )


if __name__ == "__main__":
    main()
