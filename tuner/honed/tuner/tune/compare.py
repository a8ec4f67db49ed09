"""Times two versions of a model side by side: `python -m honed.tuner.tune.compare OLD NEW`.

They run in turns in one process on one device, so that heat, clocks and other load hit both alike. The new
one must answer its probes right first.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from honed.machine import devices
from honed.process.children import answering, python, run
from honed.protocol.errors import DeviceError, HonedError
from honed.runtime.engines import PairedTiming
from honed.runtime.execution import verification
from honed.runtime.execution.executor import Executor, load

# Below this, a difference between two versions is noise.
GAIN = 1.02
_DEADLINE = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Seconds of one inference of each, host time, and whether the new one is `faster`, by `runs` pairs.

    `wrong` says which answers of the new one are wrong.
    """

    old: float
    new: float
    faster: bool
    runs: int
    wrong: str


def compare(old: Path, new: Path, spec: str) -> Compared:
    """Compare in a child process. Raises DeviceError where one of them cannot be run."""
    program = python("honed.tuner.tune.compare", str(old), str(new), "--device", spec)
    answers, death = run(program, seconds=_DEADLINE)
    answer = answers[-1] if answers else {}
    if "runs" in answer:
        return Compared(**answer)
    raise DeviceError(answer.get("failed") or f"comparing the two versions failed: {death}")


def main() -> int:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(prog="honed.tuner.tune.compare")
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--device")
    options = parser.parse_args()
    with answering() as say:
        try:
            device = devices.select(options.device)
            with load(options.old, device) as old, load(options.new, device) as new:
                wrong = next((str(d) for d in verification.check_probes(new) if not d.right), "")
                say(_time_in_turns(old, new, wrong))
        except HonedError as error:
            say({"failed": str(error)})
            return 1
    return 0


def _time_in_turns(old: Executor, new: Executor, wrong: str) -> dict[str, float | int | str]:
    inputs = _inputs(new)

    def run(executor: Executor) -> float:
        began = time.perf_counter()
        executor.run(inputs)
        return time.perf_counter() - began

    run(old)
    run(new)
    runs = PairedTiming(1 / GAIN).take_turns(partial(run, old), partial(run, new), clock=new.device.clock_hz)
    before, now = runs.times
    return {
        "old": before,
        "new": now,
        "faster": runs.within_allowance,
        "runs": len(runs.pairs),
        "wrong": wrong,
    }


def _inputs(executor: Executor) -> dict[str, np.ndarray]:
    model = executor.model
    if model.proof is None or not model.proof.probes:
        return {t.name: np.zeros(t.shape, t.dtype) for t in model.inputs}
    probe = model.proof.probes[0]
    return {
        tensor.name: executor.file.constant(buffer)
        for tensor, buffer in zip(model.inputs, probe.inputs, strict=True)
    }


if __name__ == "__main__":
    sys.exit(main())
