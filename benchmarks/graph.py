"""Measures what the passes over the graph gain: `python -m benchmarks.graph MODEL.onnx...`.

Compiles each model as it is first served for PoCL, and with default rules, attentions in one kernel as they
are first served, for a Mali-G610 and an imagined GPU: with all passes, with each one left out that applies,
and with none. Prints a table of launches, kernels, the arena and the sum of what lies in it. `--times` runs
the models on PoCL instead, with all passes, without each of those that processors alone have, without what
lies in place, and with none, in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tvm import tirx
from tvm.target import Target

from benchmarks.running import in_turns, made_up, ready
from honed.jobs.commands import shape
from honed.machine import devices
from honed.machine.devices import rules_for
from honed.machine.families import FAMILIES
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled.model import Launch
from honed.tuner import frontend
from honed.tuner.compiler.fusion import FusionPolicy, attention_seconds, separable_seconds
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.frontend import Normalised
from honed.tuner.graph import PASSES, Pass
from honed.tuner.lower.functions import legalize
from honed.tuner.lower.functions.fusing import Joins, fuse, never
from honed.tuner.lower.module import LoweredModel, lower_module
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.search.sketches.attention import attention_of
from honed.valhall.bench import bench_profile

_TURNS = 41
Shapes = Mapping[str, tuple[int, ...]]
JoinsOf = Callable[[DeviceProfile], Joins]
Instead = dict[str, Callable[..., Any]]
# What stands for the passes beside TVM's own fusion that a variant leaves out.
_NO_VIEWS: Instead = {"read_by_strides": lambda module: (module, {})}
_COPIES: Instead = {"fuse_without_moves": lambda plain, *_: fuse(plain)}
_NO_BLOCKS: Instead = {"block_lanes": lambda _profile: 0}


@dataclass(frozen=True, slots=True)
class Variant:
    """A model after some of the passes."""

    label: str
    normalised: Normalised
    joins: JoinsOf = FusionPolicy  # Decides which functions are one kernel
    instead: Instead = field(default_factory=dict)  # In `legalize`, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The size of a compiled model: launches of an inference, kernels, and bytes of scratch memory."""

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
    parser.add_argument("--times", action="store_true", help="run on PoCL instead")
    options = parser.parse_args()
    shapes = dict(map(shape, options.shape))
    if options.times:
        for path in options.models:
            _times(path, shapes)
        return 0
    print("| model | passes | device | launches | kernels | arena, MiB | tensors, MiB |\n|" + "---|" * 7)
    for path in options.models:
        for variant in _variants(path, shapes):
            for name, profile in _profiles().items():
                found = _footprint(variant, profile)
                counts = f"{found.launches} | {found.kernels}"
                sizes = f"{found.arena / 2**20:.2f} | {found.tensors / 2**20:.2f}"
                print(f"| {path.stem} | {variant.label} | {name} | {counts} | {sizes} |", flush=True)
    return 0


def _profiles() -> dict[str, DeviceProfile]:
    pocl = devices.select("cpu").profile
    limits = replace(pocl.limits, max_work_group_size=1024, max_work_item_sizes=(1024, 1024, 64))
    limits = replace(limits, local_mem_bytes=48 << 10, compute_units=64)
    gpu = replace(pocl, limits=limits, rules=rules_for(FAMILIES["gpu"], limits))
    return {"PoCL": pocl, "Mali-G610": bench_profile("mali-g610"), "GPU": gpu}


def _variants(path: Path, shapes: Shapes) -> Iterator[Variant]:
    """Yield the model in float32 with all passes, without each that applies, and with none."""
    whole = _normalised(path, shapes, PASSES)
    yield Variant("all", whole)
    for one in PASSES:
        if _applied(whole, one.name):
            left = _normalised(path, shapes, [p for p in PASSES if p is not one])
            yield Variant(f"all but {one.name}", left)
    yield Variant("all but views", whole, instead=_NO_VIEWS)
    yield Variant("all but attentions", whole, joins=partial(FusionPolicy, sorts=[separable_seconds]))
    yield Variant("all but in place", whole, instead=_COPIES)
    yield from _of_processors(whole)
    yield _none(path, shapes)


def _of_processors(whole: Normalised) -> Iterator[Variant]:
    """Yield the model without each of the passes that only processors have."""
    yield Variant("all but separables", whole, joins=partial(FusionPolicy, sorts=[attention_seconds]))
    yield Variant("all but blocks", whole, instead=_NO_BLOCKS)


def _none(path: Path, shapes: Shapes) -> Variant:
    bare = _normalised(path, shapes, ())
    return Variant("none", bare, joins=lambda _: never, instead=_NO_VIEWS | _COPIES | _NO_BLOCKS)


def _applied(whole: Normalised, name: str) -> bool:
    return any(one.name == name and one.times for one in whole.applied)


def _normalised(path: Path, shapes: Shapes, passes: Sequence[Pass]) -> Normalised:
    return frontend.normalise(frontend.load(path), shapes=shapes, precision="fp32", passes=passes)


def _lowered(variant: Variant, profile: DeviceProfile) -> LoweredModel:
    with mock.patch.dict(vars(legalize), variant.instead):
        return lower_module(
            frontend.import_relax(variant.normalised),
            profile,
            first=untuned_kernels if profile.rules.family == "cpu" else _first,
            joins=variant.joins(profile),
        )


def _footprint(variant: Variant, profile: DeviceProfile) -> Footprint:
    plan = _lowered(variant, profile).plan(profile)
    return Footprint(
        launches=sum(isinstance(step, Launch) for step in plan.steps),
        kernels=len(plan.kernels),
        arena=plan.arena_bytes,
        tensors=sum(b.nbytes for b in plan.buffers if b.place == "scratch"),
    )


def _first(
    func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile
) -> tuple[str, Lowered, list[str]]:
    """Return kernels by default rules, and for attentions the ones first served, in one kernel."""
    kernels = default_kernels if attention_of(func) is None else untuned_kernels
    return kernels(func, name, target, profile)


def _times(path: Path, shapes: Shapes) -> None:
    """Print the median time of each variant, run in turns."""
    whole = _normalised(path, shapes, PASSES)
    pads = _normalised(path, shapes, [one for one in PASSES if one.name != "pads"])
    variants = (
        Variant("all", whole),
        *([Variant("all but pads", pads)] if _applied(whole, "pads") else []),
        *_of_processors(whole),
        Variant("all but in place", whole, instead=_COPIES),
        _none(path, shapes),
    )
    device = devices.select("cpu")
    made = {
        variant.label: ready(variant.normalised, _lowered(variant, device.profile), device)
        for variant in variants
    }
    given = made_up(variants[0].normalised)
    runs = {label: partial(executor.run, given) for label, executor in made.items()}
    taken = in_turns(runs, _TURNS)
    shown = ", ".join(f"{label} {1e3 * seconds:.2f} ms" for label, seconds in taken.items())
    print(f"{path.stem}: {shown} (medians of {_TURNS}, in turns)", flush=True)
    for executor in made.values():
        executor.close()


if __name__ == "__main__":
    raise SystemExit(main())
