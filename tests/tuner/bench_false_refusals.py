"""How many right candidates are refused by mistake: none should be.

    python -m tests.tuner.bench_false_refusals [-n 1000] [--device SPEC]

Prints every refusal with its reason, then the counts; exit status 1 where there was one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from honed.runtime import devices, kernellog, peaks
from honed.runtime.errors import HonedError
from honed.tuner.measure.candidate import Outcome
from honed.tuner.measure.measurer import Measurer

from .liars import family


def main() -> int:
    """Measure and count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=1000, help="candidates")
    parser.add_argument("--device")
    options = parser.parse_args()
    device = devices.select(options.device)
    outcomes: Counter[Outcome] = Counter()
    began = time.monotonic()
    try:
        log = kernellog.open_reader()
    except HonedError as error:
        log = None
        print(f"without the kernel log: {error}")
    with tempfile.TemporaryDirectory() as folder:
        profile = peaks.measured(device, folder)
        with Measurer(device.spec, profile, kernel_log=log) as measurer:
            rounds = family.all_of(Path(folder), options.n, profile.limits.fp64)
            offered = ((honest, made) for honest in rounds for made in honest.candidates)
            loaded = ""
            for honest, made in itertools.islice(offered, options.n):
                if str(honest.workload.folder) != loaded:
                    loaded = str(honest.workload.folder)
                    measurer.load(honest.workload)
                verdict = measurer.measure(made)
                outcomes[verdict.outcome] += 1
                if verdict.outcome is not Outcome.RIGHT:
                    print(f"{honest.name}: {verdict.outcome}: {verdict.reason}", flush=True)
            print(f"children started: {measurer.children}")
    total, refused = outcomes.total(), outcomes.total() - outcomes[Outcome.RIGHT]
    print(f"{refused} of {total} right candidates were refused, {dict(outcomes)}")
    print(f"{total / (time.monotonic() - began):.2f} candidates a second")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
