"""Which right candidates of a machine's records lie beyond its peaks: none should.

    python -m tests.tuner.bench_beyond RECORDS.sqlite CACHE_DIR [--device SPEC]

Compares every right candidate that was recorded on the device with the peaks that are kept for it, by what
its task must at least compute and move and the time that was measured. Prints how near the nearest came and
each that lies beyond; exit status 1 where one does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from honed.machine import bounds
from honed.machine.surveying import survey
from honed.tuner.measure.checks import INTEGER_GAIN
from honed.tuner.records import Records
from honed.tuner.setup import setup_for
from honed.tuner.verdict import Stored


def main() -> int:
    """Compare and count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--device")
    options = parser.parse_args()
    profile = survey(options.device, options.cache).measured()
    known = profile.peaks
    assert known is not None
    print(known)
    counted, beyond, nearest = 0, 0, 0.0
    with Records.open(options.records) as records:
        for candidate in records.finished(setup_for(profile.identity)):
            task = records.task(candidate.workload)
            if candidate.outcome is not Stored.RIGHT or candidate.timing is None or task is None:
                continue
            counted += 1
            # Of its types the records say nothing: the larger of the two peaks is the bound.
            half = (known.fp16_gflops or 0.0) > known.fp32_gflops
            least = bounds.least_seconds(known, task.flops, int(task.bytes), half=half)
            share = least / candidate.timing.median_s
            nearest = max(nearest, share)
            if share > 1 + 1e-9:
                beyond += 1
                whole = f"1/{INTEGER_GAIN:g} of it where all its types are integers"
                print(f"{task.name}: {share:.3f} of the peak ({whole}): {candidate.trace_sha256}")
    print(f"{beyond} of {counted} right candidates lie beyond the peaks; the nearest is at {nearest:.3f}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
