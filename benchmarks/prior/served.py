"""How fast models are served before any tuning: `python -m benchmarks.prior.served MODEL.onnx...`.

Compiles each model twice, with default rules alone and as it is first served, and runs both in turns, beside
ONNX Runtime on the processors where that is installed. Prints medians and how far the answers are apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from honed.runtime import devices
from honed.runtime.devices import Device
from honed.runtime.executor import Executor
from honed.runtime.model import Source
from honed.tuner import frontend
from honed.tuner.assemble import assemble
from honed.tuner.compile import opened
from honed.tuner.first import first_kernels
from honed.tuner.frontend import Normalised
from honed.tuner.lower.module import First, lower_module
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.shapes import parse_shapes

_ROUNDS = 15
Feeds = dict[str, np.ndarray]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prior.served", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="INPUT=1,3,48,320", help="of each model"
    )
    parser.add_argument("--device", help="an OpenCL device's spec (the best there is)")
    options = parser.parse_args()
    device, shapes = devices.select(options.device), parse_shapes(options.shape)
    limits, name = device.profile.limits, device.profile.identity.name
    for path in options.models:
        normalised = frontend.normalise(
            frontend.load(path), shapes=shapes, fp16=limits.fp16, fp64=limits.fp64
        )
        rules, rules_seconds = _compiled(normalised, device, default_kernels)
        first, first_seconds = _compiled(normalised, device, first_kernels)
        rng = np.random.default_rng(0)
        given = {i.name: (0.1 * rng.standard_normal(i.shape)).astype(i.numpy) for i in normalised.inputs}
        runs: dict[str, Callable[[Feeds], object]] = {"rules": rules.run, "first": first.run}
        if importlib.util.find_spec("onnxruntime") is not None:
            runs["onnxruntime"] = _onnxruntime(path)
        apart = _apart(rules.run(given), first.run(given))
        times = _in_turns(runs, given)
        shown = ", ".join(f"{each} {1e3 * seconds:.2f} ms" for each, seconds in times.items())
        print(
            f"{path.stem} on {name}: {shown}; first is "
            f"{times['rules'] / times['first']:.2f} times as fast as by rules; lowered in "
            f"{rules_seconds:.1f} and {first_seconds:.1f} s; answers {apart:.1e} apart",
            flush=True,
        )
        rules.close()
        first.close()
    return 0


def _compiled(normalised: Normalised, device: Device, first: First) -> tuple[Executor, float]:
    began = time.monotonic()
    lowered = lower_module(frontend.import_relax(normalised), device.profile, first=first)
    seconds = time.monotonic() - began
    source = Source(
        sha256="0" * 64, filename="bench", producer="", opset=17, precision=normalised.precision, notes=()
    )
    model, constants = assemble(source, device.profile, normalised, lowered, None)
    return opened(model, constants, device), seconds


def _onnxruntime(path: Path) -> Callable[[Feeds], object]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return lambda given: session.run(None, given)


def _in_turns(runs: dict[str, Callable[[Feeds], object]], given: Feeds) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            run(given)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def _apart(one: Feeds, other: Feeds) -> float:
    """The largest difference, of the largest value of its output."""
    return max(
        float(np.abs(one[k].astype(np.float64) - other[k]).max() / max(1e-30, np.abs(one[k]).max()))
        for k in one
        if one[k].size
    )


if __name__ == "__main__":
    raise SystemExit(main())
