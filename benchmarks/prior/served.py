"""Times models as served before any tuning: `python -m benchmarks.prior.served MODEL.onnx...`.

Compiles each model twice, with default rules alone and as it is first served, and runs both in turns, beside
ONNX Runtime on the processors if that is installed. Its threads do not spin during others' turns; with its
default, spinning, it runs alone afterwards. Prints medians and the differences of the outputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.running import Arrays, apart, first_served, in_turns, made_up, normalised, ready
from honed.jobs.commands import shape
from honed.machine import devices
from honed.machine.profile import DeviceProfile
from honed.tuner import frontend
from honed.tuner.frontend import Normalised
from honed.tuner.lower.module import LoweredModel, lower_module

_ROUNDS = 25


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prior.served", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="INPUT=1,3,48,320", help="of each model"
    )
    parser.add_argument("--device", help="an OpenCL device's spec (the best there is)")
    options = parser.parse_args()
    device, shapes = devices.select(options.device), dict(map(shape, options.shape))
    name = device.profile.identity.name
    for path in options.models:
        model = normalised(path, device.profile, shapes)
        lowered, seconds = {}, {}
        for label, lower in (("rules", _by_rules), ("first", first_served)):
            began = time.monotonic()
            lowered[label] = lower(model, device.profile)
            seconds[label] = time.monotonic() - began
        made = {label: ready(model, each, device) for label, each in lowered.items()}
        given = made_up(model)
        runs: dict[str, Callable[[], object]] = {
            label: partial(executor.run, given) for label, executor in made.items()
        }
        beside = importlib.util.find_spec("onnxruntime") is not None
        if beside:
            runs["onnxruntime"] = _onnxruntime(path, given, spins=False)
        rules, first = (executor.run(given) for executor in made.values())
        differs = max(apart(rules[each], first[each]) for each in rules)
        times = in_turns(runs, _ROUNDS)
        if beside:
            times |= in_turns({"onnxruntime alone, spinning": _onnxruntime(path, given, spins=True)}, _ROUNDS)
        shown = ", ".join(f"{each} {1e3 * taken:.2f} ms" for each, taken in times.items())
        print(
            f"{path.stem} on {name}: {shown}; first is "
            f"{times['rules'] / times['first']:.2f} times as fast as by rules; lowered in "
            f"{seconds['rules']:.1f} and {seconds['first']:.1f} s; answers {differs:.1e} apart",
            flush=True,
        )
        for executor in made.values():
            executor.close()
    return 0


def _by_rules(model: Normalised, profile: DeviceProfile) -> LoweredModel:
    return lower_module(frontend.import_relax(model), profile)


def _onnxruntime(path: Path, given: Arrays, *, spins: bool) -> Callable[[], object]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = len(os.sched_getaffinity(0))
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, given)


if __name__ == "__main__":
    raise SystemExit(main())
