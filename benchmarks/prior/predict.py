"""Records for the prior of Malis: `python -m benchmarks.prior.predict OUT.jsonl [--layers N] [--seed S]`.

Draws schedules of made-up layers in halves and in singles and has the Valhall bench judge them: predicted
times, for want of a Mali to measure on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from honed.tuner.measure.candidate import Candidate, inference_launches
from honed.tuner.tune.extract import Extracted, extract, workload
from honed.tuner.valhall.benches import predicted
from honed.tuner.valhall.compiler import ROOT, Dump, NotBuilt, OfflineCompiler
from honed.tuner.valhall.judge import MachineCodeJudge, seconds
from honed.tuner.verdict import Stored, Timing

from .schedules import Tried, record, schedules
from .zoo import write


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prior.predict", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    profile = predicted("mali-g610")
    with (
        tempfile.TemporaryDirectory() as folder,
        OfflineCompiler(options.root) as compiler,
        options.output.open("wb") as file,
    ):
        judge = MachineCodeJudge(compiler)
        for n, path in enumerate(write(Path(folder), options.layers, options.seed)):
            if time.monotonic() > end:
                break
            for one in extract(path, {}, "fp32" if n % 4 == 3 else "fp16", profile).tasks:
                tried = list(schedules(one, profile, options.seed))
                times = [_seconds(one, each, begun, judge) for each, begun in _begun(tried, judge)]
                for each, taken in zip(tried, times, strict=True):
                    outcome = Stored.RIGHT if taken else Stored.NOT_BUILT
                    timing = taken and Timing(median_s=taken, low_s=taken, high_s=taken, repeats=1)
                    file.write(record(one, each, profile.identity, outcome, timing or None))
                file.flush()
                print(f"{path.stem} {one.task.name[:40]}: {len(times)} judged", flush=True)
    return 0


def _begun(tried: Sequence[Tried], judge: MachineCodeJudge) -> list[tuple[Tried, Future[Dump]]]:
    """All of them, compiled side by side."""
    return [(each, judge.begin(each.lowered.source)) for each in tried]


def _seconds(one: Extracted, tried: Tried, begun: Future[Dump], judge: MachineCodeJudge) -> float | None:
    """What a schedule is predicted to take; None where Mesa's compiler does not build it."""
    task = workload(one.task.key, one.func, one.task.outputs, Path(), None, one.task.constants)
    launches = inference_launches(task, Candidate.of("", tried.lowered))
    try:
        return seconds(judge.judge(tried.lowered.source, launches, begun))
    except NotBuilt:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
