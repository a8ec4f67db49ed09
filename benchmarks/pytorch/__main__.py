"""Models on an NVIDIA GPU beside PyTorch's CUDA graph: `python -m benchmarks.pytorch MODEL...`.

A model is an ONNX file, compiled here as it is first served, or `MODEL.onnx=TUNED.honed`, which is run as
well. PyTorch has float32 without TF32, its convolutions chosen by cuDNN's own search. All take turns in one
process; printed are medians of whole inferences, from arrays of the host to arrays of the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.running import Arrays, apart, first_served, in_turns, made_up, normalised, ready
from honed.machine import devices
from honed.machine.devices import Device
from honed.runtime import load

from .cudagraph import CudaGraph


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytorch", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL[=TUNED]")
    parser.add_argument("--device", help="an OpenCL device's spec (the best there is)")
    parser.add_argument("--turns", type=int, default=100, help="of each (100)")
    options = parser.parse_args()
    device = devices.select(options.device)
    print("| model | honed | ms | kernels, ms | PyTorch, ms | its graph, ms | times as long | apart |")
    print("|" + "---|" * 8, flush=True)
    for each in options.models:
        path, _, tuned = each.partition("=")
        _report(Path(path), Path(tuned) if tuned else None, device, options.turns)
    return 0


def _report(path: Path, tuned: Path | None, device: Device, turns: int) -> None:
    model = normalised(path, device.profile)
    given = made_up(model)
    theirs = CudaGraph(path, given)
    ours = {"first served": ready(model, first_served(model, device.profile), device)}
    if tuned is not None:
        ours["tuned"] = load(tuned, device)
    runs: dict[str, Callable[[], Arrays]] = {"": partial(theirs.run, given)}
    runs |= {name: partial(executor.run, given) for name, executor in ours.items()}
    expected = list(runs[""]().values())
    taken = {name: 1e3 * seconds for name, seconds in in_turns(runs, turns).items()}
    for name, executor in ours.items():
        differs = max(apart(a, b) for a, b in zip(expected, runs[name]().values(), strict=True))
        kernels = executor.profile(given).sum_us / 1e3
        print(
            f"| {path.stem} | {name} | {taken[name]:.2f} | {kernels:.2f} | {taken['']:.2f} | "
            f"{theirs.device_us() / 1e3:.2f} | {taken[name] / taken['']:.2f} | {differs:.1e} |",
            flush=True,
        )
        executor.close()


if __name__ == "__main__":
    raise SystemExit(main())
