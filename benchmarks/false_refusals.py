"""Counts right candidates that are refused by mistake: none should be.

    python -m benchmarks.false_refusals [-n 1000] [--by search|hand] [--device SPEC]

Measures candidates as the search makes them, of functions of every kind, or kernels written by hand. Prints
every refusal with its reason, then the counts by cause. Exit status 1 if something was refused that cannot be
the candidate's own fault: kernels written by hand are right, and a candidate of the search is only refused
rightly for its source or for what the compiler makes of it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.tuner.liars import family

from honed.machine import devices, peaks
from honed.machine.kernellog.reader import open_reader
from honed.machine.profile import DeviceProfile
from honed.runtime.errors import HonedError
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import Outcome

Offered = Iterator[tuple[str, Workload, Candidate]]
# Outcomes that are a candidate's own fault: too long for the driver's compiler, or slow.
_OWN = {Outcome.RIGHT, Outcome.BUILD, Outcome.DEADLINE}


def main() -> int:
    """Measure candidates, and count those refused by mistake."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=1000, help="candidates")
    parser.add_argument("--by", choices=("search", "hand"), default="search")
    parser.add_argument("--device")
    options = parser.parse_args()
    device = devices.select(options.device)
    outcomes: Counter[Outcome] = Counter()
    began = time.monotonic()
    try:
        log = open_reader()
    except HonedError as error:
        log = None
        print(f"without the kernel log: {error}")
    with tempfile.TemporaryDirectory() as folder:
        profile = peaks.load_or_measure(device, folder)
        offered = (_searched if options.by == "search" else _by_hand)(Path(folder), options.n, profile)
        with Measurer(device.spec, profile, kernel_log=log) as measurer:
            loaded, seen = "", Counter[str]()
            for name, workload, made in itertools.islice(offered, options.n):
                if str(workload.folder) != loaded:
                    loaded = str(workload.folder)
                    measurer.load(workload)
                verdict = measurer.measure(made)
                outcomes[verdict.outcome] += 1
                seen[name.partition("-")[0] if options.by == "hand" else name] += 1
                if verdict.outcome is not Outcome.RIGHT:
                    print(f"{name}: {verdict.outcome}: {verdict.reason}", flush=True)
            print(f"children started: {measurer.children}")
    print(f"of {dict(seen)}")
    total, right = outcomes.total(), outcomes[Outcome.RIGHT]
    print(f"{total - right} of {total} candidates were refused, {dict(outcomes)}")
    print(f"{total / (time.monotonic() - began):.2f} candidates a second")
    own = _OWN if options.by == "search" else {Outcome.RIGHT}
    return 1 if set(outcomes) - own else 0


def _by_hand(folder: Path, count: int, profile: DeviceProfile) -> Offered:
    for honest in family.all_of(folder, count, profile.limits.fp64):
        for made in honest.candidates:
            yield honest.name, honest.workload, made


def _searched(folder: Path, count: int, profile: DeviceProfile) -> Offered:
    from tests.tuner.liars import searched

    from honed.tuner.tune.extract import workload

    functions = searched.functions()
    each = -(-count // len(functions))
    for seed in itertools.count():
        for name, func in functions.items():
            task = workload(name, func, 1, folder / f"{name}-{seed}", 0)
            for made in searched.candidates(func, profile, each, seed):
                yield name, task, made


if __name__ == "__main__":
    sys.exit(main())
