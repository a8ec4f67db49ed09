"""Dense products on an NVIDIA GPU: default schedule, tuned, and cuBLAS without TF32, side by side.

    python -m benchmarks.nvidia [--seconds 100] [--device SPEC] [--output FILE.json] [--faults]

Needs PyTorch with CUDA (for cuBLAS) and NVIDIA's OpenCL driver. With --faults one of our kernels is made to
write out of bounds afterwards, near and far, and the session's story is printed; the far write is a real
fault of the GPU's memory unit, and needs the kernel log to be readable.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.tuner.nvidia import faults, prebuild, tuning
from tests.tuner.nvidia.sidebyside import compare

from honed.machine import devices, peaks
from honed.machine.kernellog.reader import Reader, open_reader
from honed.runtime.errors import HonedError
from honed.tuner.measure.candidate import MeasureLimits
from honed.tuner.measure.measurer import Measurer
from honed.tuner.search.costmodel import WIDTH, CostModel

SHAPES = ((192, 512, 512), (1024, 1024, 1024), (4096, 4096, 4096))  # m, n, k
KIN = 24  # Best traces at 1024 that the search at 4096 starts from


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=100.0, help="of search, for each product")
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path, help="all figures, as JSON")
    parser.add_argument("--faults", action="store_true")
    options = parser.parse_args()
    device = devices.select(options.device)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        profile = peaks.load_or_measure(device, place)
        reported: dict[str, Any] = {
            "device": vars_of(profile.identity),
            "peaks": vars_of(profile.peaks),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "products": [],
        }
        print(json.dumps(reported), flush=True)
        with prebuild.pool(device.spec) as workers:
            tuned = _tune_all(device.spec, profile, place, workers, options.seconds)
        for found in tuned:
            reported["products"].append(_row(device.spec, found))
            _save(reported, options.output)
        if options.faults:
            reader, reported["kernel_log"] = _kernel_log()
            reported["faults"] = faults.run(device.spec, profile, place, reader)
            print(reported["kernel_log"], json.dumps(reported["faults"], indent=1), sep="\n")
        _save(reported, options.output)
    for row in reported["products"]:
        print(
            f"{row['product']:>16}  default {row['default_gflops']:8.0f}  tuned {row['tuned_gflops']:8.0f}  "
            f"cuBLAS {row['cublas_gflops']:8.0f} GFLOP/s  default/cuBLAS {row['default_of_cublas']:.2f}  "
            f"tuned/cuBLAS {row['tuned_of_cublas']:.2f}  tuned/default {row['tuned_of_default']:.1f}"
        )


def _tune_all(spec: str, profile: Any, place: Path, workers: Any, seconds: float) -> list[tuning.Tuned]:
    limits = MeasureLimits(memory_bytes=8 << 30)
    threads = os.cpu_count() or 1
    tuned: list[tuning.Tuned] = []
    with Measurer(spec, profile, limits, command=tuning.CACHED) as measurer:
        bench = tuning.Bench(profile, measurer, workers, CostModel(WIDTH), place, threads)
        for shape in SHAPES:
            related = _related(tuned[-1], shape) if tuned else []
            tuned.append(tuning.tune(bench, shape, seconds, related))
    return tuned


def _kernel_log() -> tuple[Reader | None, str]:
    """Return a reader of the kernel log and its name; None with the reason if it cannot be read."""
    try:
        reader = open_reader()
    except HonedError as error:
        return None, str(error)
    return reader, type(reader).__name__


def _related(before: tuning.Tuned, shape: tuple[int, int, int]) -> list[str]:
    """Return the best traces of a cube, to begin another with: TVM fits their outermost tiles to it."""
    if len({*before.shape}) > 1 or len({*shape}) > 1:
        return []
    return [t for s, t in sorted((s, t) for t, s in before.known.items() if math.isfinite(s))[:KIN]]


def _row(spec: str, found: tuning.Tuned) -> dict[str, Any]:
    candidates = {"default": found.default} | ({"tuned": found.best} if found.best else {})
    times, differences = compare(spec, found.shape, candidates)
    gflop = 2 * math.prod(found.shape) * 1e-9
    default, tuned = times.kernels["default"], times.kernels.get("tuned", math.inf)
    row = {
        "product": "x".join(map(str, found.shape)),
        "default_rule": found.default_rule,
        "default_gflops": gflop / default,
        "tuned_gflops": gflop / tuned,
        "cublas_gflops": gflop / times.cublas,
        "default_of_cublas": times.cublas / default,
        "tuned_of_cublas": times.cublas / tuned,
        "tuned_of_default": default / tuned,
        "alone_us": {name: seconds * 1e6 for name, seconds in times.alone.items()},
        "differences": differences,
        "outcomes": dict(found.outcomes),
        "rankings": found.rankings,
        "rounds": found.rounds,
        "trace": found.best_trace,
        "source": found.best.source if found.best else "",
    }
    print(json.dumps({k: v for k, v in row.items() if k not in ("trace", "source")}), flush=True)
    return row


def vars_of(value: Any) -> dict[str, Any]:
    """Return a dataclass with slots as a dict."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _save(reported: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(reported, indent=1))


if __name__ == "__main__":
    main()
