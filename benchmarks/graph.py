"""What the passes over the graph bring: `python -m benchmarks.graph MODEL.onnx...`.

Compiles each model with default rules for PoCL, a Mali-G610 and an imagined GPU: with all passes, with each
one left out that applies, and with none. Prints a table of launches, kernels, the arena and the sum of what
lies in it. `--times` runs the models on PoCL instead, with all passes and with none, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from honed.runtime import devices
from honed.runtime.devices import rules_for
from honed.runtime.executor import Executor
from honed.runtime.model import Launch, Source
from honed.runtime.profile import DeviceProfile
from honed.tuner import frontend
from honed.tuner.assemble import assemble
from honed.tuner.compile import opened
from honed.tuner.frontend import Normalised
from honed.tuner.graph import PASSES, Pass
from honed.tuner.lower.module import lower_module
from honed.tuner.shapes import parse_shapes
from honed.tuner.valhall.benches import predicted

_TURNS = 15
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of a compiled model: launches of an inference, kernels, and bytes of scratch memory."""

    launches: int
    kernels: int
    arena: int
    tensors: int


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="INPUT=1,3,48,320", help="of each model"
    )
    parser.add_argument("--times", action="store_true", help="run on PoCL, with all passes and with none")
    options = parser.parse_args()
    shapes = parse_shapes(options.shape)
    if options.times:
        for path in options.models:
            _times(path, shapes)
        return 0
    print("| model | passes | device | launches | kernels | arena, MiB | tensors, MiB |\n|" + "---|" * 7)
    for path in options.models:
        for label, normalised, views in _variants(path, shapes):
            for name, profile in _profiles().items():
                found = _footprint(normalised, profile, views=views)
                sizes = f"{found.arena / 2**20:.2f} | {found.tensors / 2**20:.2f}"
                print(
                    f"| {path.stem} | {label} | {name} | {found.launches} | {found.kernels} | {sizes} |",
                    flush=True,
                )
    return 0


def _profiles() -> dict[str, DeviceProfile]:
    pocl = devices.select("cpu").profile
    limits = replace(pocl.limits, max_work_group_size=1024, max_work_item_sizes=(1024, 1024, 64))
    limits = replace(limits, local_mem_bytes=48 << 10, compute_units=64)
    gpu = replace(pocl, limits=limits, rules=rules_for("gpu", limits))
    return {"PoCL": pocl, "Mali-G610": predicted("mali-g610"), "GPU": gpu}


def _variants(path: Path, shapes: Shapes) -> Iterator[tuple[str, Normalised, bool]]:
    """The model in float32, and whether by views: with all passes, without each that applies, with none."""
    whole = _normalised(path, shapes, PASSES)
    applied = {one.name: one.times for one in whole.applied}
    yield "all", whole, True
    for one in PASSES:
        if applied[one.name]:
            yield f"all but {one.name}", _normalised(path, shapes, [p for p in PASSES if p is not one]), True
    yield "all but views", whole, False
    yield "none", _normalised(path, shapes, ()), False


def _normalised(path: Path, shapes: Shapes, passes: Sequence[Pass]) -> Normalised:
    return frontend.normalise(frontend.load(path), shapes=shapes, precision="fp32", passes=passes)


def _footprint(normalised: Normalised, profile: DeviceProfile, *, views: bool) -> Footprint:
    plan = lower_module(frontend.import_relax(normalised), profile, views=views).plan(profile)
    return Footprint(
        launches=sum(isinstance(step, Launch) for step in plan.steps),
        kernels=len(plan.kernels),
        arena=plan.arena_bytes,
        tensors=sum(b.nbytes for b in plan.buffers if b.place == "scratch"),
    )


def _times(path: Path, shapes: Shapes) -> None:
    """Print the least time of each of two variants, run in turns."""
    made = {
        label: _opened(_normalised(path, shapes, passes), views=bool(passes))
        for label, passes in (("all", PASSES), ("none", ()))
    }
    rng = np.random.default_rng(0)
    given = {
        t.name: rng.standard_normal(t.shape).astype(t.dtype)
        for t in next(iter(made.values())).file.model.inputs
    }
    least = dict.fromkeys(made, float("inf"))
    for _ in range(_TURNS):
        for label, executor in made.items():
            began = time.perf_counter()
            executor.run(given)
            least[label] = min(least[label], time.perf_counter() - began)
    shown = ", ".join(f"{label} {1e3 * seconds:.1f} ms" for label, seconds in least.items())
    print(f"{path.stem}: {shown} (least of {_TURNS}, in turns)", flush=True)
    for executor in made.values():
        executor.close()


def _opened(normalised: Normalised, *, views: bool) -> Executor:
    device = devices.select("cpu")
    lowered = lower_module(frontend.import_relax(normalised), device.profile, views=views)
    source = Source(
        sha256="0" * 64, filename="bench", producer="", opset=17, precision=normalised.precision, notes=()
    )
    return opened(*assemble(source, device.profile, normalised, lowered, None), device)


if __name__ == "__main__":
    raise SystemExit(main())
