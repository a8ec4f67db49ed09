"""Records for the prior of Malis: `python -m benchmarks.prior.predict OUT.npz [--layers N] [--seed S]`.

Draws schedules of made-up layers in halves and in singles and has the Valhall bench judge them: predicted
times, for want of a Mali to measure on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from honed.tuner.measure.candidate import Candidate
from honed.tuner.measure.prepared import inference_launches
from honed.tuner.search.costmodel import CostModel
from honed.tuner.search.features import WIDTH
from honed.tuner.tune.extract import extract, workload
from honed.tuner.valhall.benches import predicted
from honed.tuner.valhall.compiler import ROOT, NotBuilt, OfflineCompiler
from honed.tuner.valhall.judge import Judge, seconds

from .schedules import schedules
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
    model = CostModel(WIDTH)
    with tempfile.TemporaryDirectory() as folder, OfflineCompiler(options.root) as compiler:
        judge = Judge(compiler)
        for n, path in enumerate(write(Path(folder), options.layers, options.seed)):
            if time.monotonic() > end:
                break
            for one in extract(path, {}, "fp32" if n % 4 == 3 else "fp16", profile)[0]:
                tried = list(schedules(one.func, profile, options.seed))
                task = workload(one.task.key, one.func, one.outputs, Path(), None, one.task.constants)
                begun = [judge.begin(lowered.source) for _, lowered in tried]
                times = []
                for (_, lowered), dump in zip(tried, begun, strict=True):
                    try:
                        launches = inference_launches(task, Candidate.of("", lowered))
                        times.append(seconds(judge.judge(lowered.source, launches, dump)))
                    except NotBuilt:
                        times.append(np.inf)
                if tried:
                    model.add(one.task.key, np.array([row for row, _ in tried]), np.array(times))
                    best = min(times) * 1e6
                    print(
                        f"{path.stem} {one.task.name[:40]}: {len(times)} judged, best {best:.1f} us",
                        flush=True,
                    )
            model.save(options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
