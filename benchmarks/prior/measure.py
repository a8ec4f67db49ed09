"""Records for a prior, measured on this machine's device: `python -m benchmarks.prior.measure OUT.jsonl`.

Draws schedules of made-up layers, and judges and times them as tuning does. Several may run side by side,
each with a seed of its own: they draw and build at once, and measure in turns.
"""

from __future__ import annotations

import argparse
import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from honed.machine.peaks import survey
from honed.tuner.measure.candidate import Candidate, MeasureLimits, Workload
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import Outcome, Verdict
from honed.tuner.tune.extract import extract, workload

from .schedules import Tried, record, schedules
from .zoo import add_kinds, write

_LIMITS = MeasureLimits(timing_seconds=0.1, warm_seconds=0.05)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prior.measure", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", help="an OpenCL device's spec (the best there is)")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("/tmp/honed-prior"), help="where peaks are kept"
    )
    parser.add_argument("--layers", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    add_kinds(parser)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    options.cache_dir.mkdir(parents=True, exist_ok=True)
    turn = options.cache_dir / "turn"
    with _in_turn(turn):
        found = survey(options.device, options.cache_dir)
    profile = found.require_peaks()
    with (
        tempfile.TemporaryDirectory() as folder,
        Measurer(found.spec, profile, _LIMITS, builders=1) as measurer,
        options.output.open("wb") as file,
    ):
        for path in write(Path(folder), options.layers, options.seed, options.kinds):
            for one in extract(path, {}, "fp32", profile).tasks:
                if time.monotonic() > end:
                    return 0
                tried = list(schedules(one, profile, options.seed))
                if not tried:
                    continue
                sets = Path(folder) / one.task.key
                task = workload(
                    one.task.key, one.func, one.task.outputs, sets, options.seed, one.task.constants
                )
                right = 0
                for each, verdict in zip(tried, _measured(task, tried, measurer, turn), strict=True):
                    right += verdict.outcome is Outcome.RIGHT
                    outcome, timing = verdict.outcome.stored_as, verdict.timing
                    wrong = verdict.outcome.quarantines
                    file.write(record(one, each, profile.identity, outcome, timing, quarantined=wrong))
                file.flush()
                print(f"{path.stem} {one.task.name[:40]}: {right} of {len(tried)} right", flush=True)
    return 0


def _measured(task: Workload, tried: list[Tried], measurer: Measurer, turn: Path) -> Iterator[Verdict]:
    """Yield a verdict on each."""
    candidates = [Candidate.of(str(n), each.lowered) for n, each in enumerate(tried)]
    measurer.load(task)
    measurer.build(candidates)
    best: float | None = None
    for candidate in candidates:
        with _in_turn(turn):
            verdict = measurer.measure(candidate, best)
        if verdict.outcome is Outcome.RIGHT and verdict.timing is not None:
            best = min(verdict.timing.median_s, best or verdict.timing.median_s)
        yield verdict


@contextmanager
def _in_turn(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    raise SystemExit(main())
