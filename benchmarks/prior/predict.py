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

from honed.runtime import profilefile
from honed.tuner import valhall
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search.costmodel import CostModel
from honed.tuner.search.draw import draws
from honed.tuner.search.features import WIDTH
from honed.tuner.tune.extract import extract
from honed.tuner.valhall.compiler import ROOT, NotBuilt, OfflineCompiler
from honed.tuner.valhall.judge import Judge, seconds

from .zoo import write

_EACH = 6  # draws from each sketch


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
    profile = profilefile.load(valhall.PROFILE)
    model = CostModel(WIDTH)
    with tempfile.TemporaryDirectory() as folder, OfflineCompiler(options.root) as compiler:
        judge = Judge(compiler)
        for n, path in enumerate(write(Path(folder), options.layers, options.seed)):
            if time.monotonic() > end:
                break
            for one in extract(path, {}, "fp32" if n % 4 == 3 else "fp16", profile)[0]:
                func = narrow_indices(one.func)
                built: list[tuple[Lowered, np.ndarray]] = []
                for draw in draws(func, profile, _EACH, options.seed):
                    try:
                        lowered = lower_function(draw.scheduled, "main", target_for(profile), profile)
                    except LoweringFailed:
                        continue
                    built.append((lowered, draw.features))
                begun = [judge.begin(lowered.source) for lowered, _ in built]
                times = []
                for (lowered, _), dump in zip(built, begun, strict=True):
                    try:
                        times.append(seconds(judge.judge(lowered.source, lowered.launches, dump)))
                    except NotBuilt:
                        times.append(np.inf)
                if built:
                    rows = np.array([features for _, features in built])
                    model.add(one.task.key, rows, np.array(times))
                    best = min(times) * 1e6
                    print(
                        f"{path.stem} {one.task.name[:40]}: {len(times)} judged, best {best:.1f} us",
                        flush=True,
                    )
            model.save(options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
