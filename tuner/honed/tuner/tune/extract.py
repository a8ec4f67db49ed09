"""Extracts tuning tasks from a model: the first work of the searching child."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import tvm
from tvm import ir, tirx
from tvm_ffi import structural_walk

from honed.machine.profile import DeviceProfile
from honed.protocol.errors import InvalidArgument, ModelRefused
from honed.runtime.compiled.model import CompiledModel
from honed.tuner import frontend
from honed.tuner.compiler import sized
from honed.tuner.compiler.compile import prepare, read_existing_build
from honed.tuner.compiler.fusion import FusionAlternatives, FusionPolicy
from honed.tuner.compiler.partition import PartitionedModel
from honed.tuner.lower.functions.updates import parameters_kept
from honed.tuner.lower.module import legal_model
from honed.tuner.lower.opencl import blocks_to_loops
from honed.tuner.lower.program import FunctionCall, HostFunctionCall, MemoryValue
from honed.tuner.lower.schedule import fresh
from honed.tuner.lower.sums import most_additions, reductions
from honed.tuner.lower.workload import (
    count_reached_bytes,
    function_flops,
    mark_constants,
    marks_of,
    parameters,
    task_key,
)
from honed.tuner.measure.candidate import Workload
from honed.tuner.mixed_precision import choose

from .task import TuningTask

_ON_THE_HOST = "a part of the model that the CPU engine runs"
_IN_PLACE = "it stores what changes of a value, and candidates are judged by all of it"
SETS = 3  # Sets of inputs, each of another distribution
SINGLE_ROUNDOFF, HALF_ROUNDOFF = 2.0**-24, 2.0**-11


@dataclass(frozen=True, slots=True, eq=False)
class Extracted:
    """A task with its function."""

    task: TuningTask
    func: tirx.PrimFunc


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extraction:
    """A model's tasks.

    `rivals`, of weight 0, belong to variants that are not served first; `contests` compare both variants.
    `opaque` tasks cannot be tuned.
    """

    tasks: list[Extracted]
    rivals: list[Extracted]
    opaque: list[TuningTask]
    contests: tuple[FusionAlternatives, ...]


def extract(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    precision: frontend.Precision,
    profile: DeviceProfile,
    *,
    calibration: Path | None = None,
    existing_build: Path | None = None,
) -> Extraction:
    """Extract the tasks of an ONNX file; raise the errors of compiling.

    Its calls of partitions are a task that cannot be tuned, and so is what updates inputs in place.
    `calibration` and `existing_build` are as in `honed.tuner.compiler.compile.CompileRequest`. Partitions
    have the sizes that `existing_build` was compiled for, whether the CPU engine was faster or not.
    """
    prepared = prepare(frontend.load(path), shapes, precision, profile)
    normalised, before = prepared.normalised, read_existing_build(existing_build, prepared, precision)
    if precision == "auto":
        choice = choose.decide(prepared.source, normalised, profile, calibration=calibration, like=before)
        normalised = choose.apply(choice, normalised)
    joining = FusionPolicy(profile)
    legal = legal_model(frontend.import_relax(normalised), profile, joining)
    calls = [call for call in legal.program.calls if isinstance(call, FunctionCall)]
    weights = Counter(call.function for call in calls)
    outputs = {call.function: len(call.outputs) for call in calls}
    tasks = [
        Extracted(_task(func, name, task_key(func), weights[name], outputs[name]), func)
        for name, func in legal.functions.items()
        if not parameters_kept(func)
    ]
    updates = {task_key(func): name for name, func in legal.functions.items() if parameters_kept(func)}
    hosts = Counter(call.function for call in legal.program.calls if isinstance(call, HostFunctionCall))
    rivals, contests = _rivals(joining, {one.task.key for one in tasks}, profile)
    whole = Extraction(
        tasks=tasks,
        rivals=rivals,
        opaque=[
            *(_opaque(f"host:{name}", name, weight, _ON_THE_HOST) for name, weight in hosts.items()),
            *(_opaque(key, name, weights[name], _IN_PLACE) for key, name in updates.items()),
        ],
        contests=contests,
    )
    return _together([whole, *_of_parts(prepared.cut, precision, profile, before)])


def _of_parts(
    cut: PartitionedModel | None,
    precision: frontend.Precision,
    profile: DeviceProfile,
    like: CompiledModel | None,
) -> Iterator[Extraction]:
    """Yield the extractions of partitions, in the sizes that they were compiled for.

    Partitions that cannot be compiled are skipped.
    """
    if cut is None:
        return
    sizes, _ = sized.choose_sizes(cut, (), like)
    for observed in sizes:
        with tempfile.TemporaryDirectory(prefix="honed-part-") as folder:
            path = Path(folder) / "part.onnx"
            onnx.save(cut.parts[observed.part].model, path)
            # Compiling the model reports these errors
            with contextlib.suppress(ModelRefused, InvalidArgument):
                yield extract(path, sized.shapes_of(cut, observed), sized.precision(precision), profile)


def _together(extractions: Sequence[Extraction]) -> Extraction:
    """Merge extractions: sum the runs of each task, and drop rivals that another extraction serves."""
    tasks: dict[str, Extracted] = {}
    opaque: dict[str, TuningTask] = {}
    for extraction in extractions:
        for one in extraction.opaque:
            weight = one.weight + (opaque[one.key].weight if one.key in opaque else 0)
            opaque[one.key] = replace(one, weight=weight)
        for each in extraction.tasks:
            key, weight = each.task.key, each.task.weight
            weight += tasks[key].task.weight if key in tasks else 0
            tasks[key] = replace(each, task=replace(each.task, weight=weight))
    rivals = {one.task.key: one for extraction in extractions for one in extraction.rivals}
    return Extraction(
        tasks=list(tasks.values()),
        rivals=[one for key, one in rivals.items() if key not in tasks],
        opaque=list(opaque.values()),
        contests=tuple(one for extraction in extractions for one in extraction.contests),
    )


def _rivals(
    joining: FusionPolicy, keys: Set[str], profile: DeviceProfile
) -> tuple[list[Extracted], tuple[FusionAlternatives, ...]]:
    """Return tasks of the variants that a model is not first served in, and the contests with them."""
    rivals: dict[str, Extracted] = {}
    contests = []
    for contest, forms in joining.contests:
        if not keys >= set(contest.keys(contest.expected)):
            continue  # A call outside the found tasks, or one with other constants elsewhere
        contests.append(contest)
        for one in (forms.fused, *forms.unfused):
            func = mark_constants(one.func, one.constants, profile)
            key = task_key(func)
            if key not in keys:
                rivals[key] = Extracted(_task(func, one.name, key, 0, one.outputs), func)
    return list(rivals.values()), tuple(contests)


def _opaque(key: str, name: str, weight: int, why: str) -> TuningTask:
    """Return calls as a task that cannot be tuned."""
    return TuningTask(key=key, name=name, weight=weight, flops=0, bytes=0, dtype="", opaque=f"opaque: {why}")


def adopt(func: tirx.PrimFunc, name: str, outputs: int) -> Extracted:
    """Return a user's own function as a task of weight 1; raise InvalidArgument where it cannot be one."""
    if not 0 < outputs <= len(func.params):
        raise InvalidArgument(
            f"{name} has {len(func.params)} parameters, so its last {outputs} cannot be outputs; "
            "say how many of its last parameters are"
        )
    if any(not isinstance(n, tirx.IntImm) for p in func.params for n in getattr(p, "shape", (None,))):
        raise InvalidArgument(f"{name} has parameters that are no buffers of known shape; give it some")
    return Extracted(_task(func, name, task_key(func), 1, outputs), func)


def _task(func: tirx.PrimFunc, name: str, key: str, weight: int, outputs: int) -> TuningTask:
    values = parameters(func)
    floats = [v.dtype for v in values if v.dtype.startswith("float")]
    return TuningTask(
        key=key,
        name=name,
        weight=weight,
        flops=function_flops(func),
        bytes=count_reached_bytes(func),
        dtype=floats[-1] if floats else values[-1].dtype,
        opaque="",
        outputs=outputs,
        constants=marks_of(func),
    )


def tolerances(func: tirx.PrimFunc, outputs: int) -> tuple[float, ...]:
    """Return how far each output may be off, relative to its largest reference value.

    Sums whose terms pass through n additions differ by about u sqrt(n) of the largest partial sum between two
    orders, with u the unit roundoff (Higham and Mary, SIAM J. Sci. Comput. 41, 2019); 32 times that leaves
    room for what follows the sum, and stays far below the error of a wrong kernel. n is what `lower.sums`
    bounds for sums, which are added up in blocks, and the number of terms for products, which a schedule may
    add up one by one. Where any intermediate value is rounded to halves, wider outputs get the tolerance of
    halves. Integers and booleans must be equal.
    """
    terms = math.sqrt(most_additions(func))
    allowed = {
        "float64": 1e-9,
        "float32": max(1e-5, 32 * SINGLE_ROUNDOFF * terms),
        "float16": min(0.05, 8 * HALF_ROUNDOFF * terms),
    }
    least = allowed["float16"] if _rounds_to_halves(func) else 0.0
    outs = parameters(func)[-outputs:]
    return tuple(max(allowed[v.dtype], least) if v.dtype in allowed else 0.0 for v in outs)


def _rounds_to_halves(func: tirx.PrimFunc) -> bool:
    """Return whether the function stores any value as a half, as a product of halves does before widening."""
    stores: list[tirx.BufferStore] = []
    structural_walk(func.body, [(tirx.BufferStore, stores.append)], order="post")
    return any(str(store.buffer.dtype) == "float16" for store in stores)


def workload(
    key: str,
    func: tirx.PrimFunc,
    outputs: int,
    folder: Path,
    seed: int | None,
    constants: Sequence[int] = (),
) -> Workload:
    """Return a task for the measuring child.

    `folder` holds answers for inputs drawn from `seed`, which are computed where they are missing; there are
    none if `seed` is None.
    """
    if seed is not None and not folder.exists():
        write_sets(func, outputs, folder, seed)
    values = parameters(func)
    return Workload(
        task=key,
        parameters=values,
        outputs=tuple(range(len(values) - outputs, len(values))),
        sets=0 if seed is None else SETS,
        folder=folder,
        flops=function_flops(func),
        bytes=count_reached_bytes(func),
        tolerance=tolerances(func, outputs),
        constants=tuple(constants),
    )


def write_sets(func: tirx.PrimFunc, outputs: int, folder: Path, seed: int) -> None:
    """Draw inputs and compute outputs with TVM's CPU code of the unscheduled function; write S.P.npy.

    Long sums are added up in blocks there, too: a reference must be at least as exact as the kernels it
    judges.

    `folder` exists only once all files are complete.
    """
    values = parameters(func)
    draft = folder.with_name(f"{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    loops = tvm.transform.Sequential(blocks_to_loops(pairs=False))
    whole = ir.IRModule({"main": fresh(func).with_attr("global_symbol", "main")})
    run = tvm.compile(loops(whole), target="llvm")["main"]
    scale = product_scale(func)
    for n in range(SETS):
        rng = np.random.default_rng([seed, n])
        arrays = [_draw(rng, v, n, values, scale) for v in values[:-outputs]]
        arrays += [np.zeros(v.shape, v.dtype) for v in values[-outputs:]]
        tensors = [tvm.runtime.tensor(a) for a in arrays]
        run(*tensors)
        for p, tensor in enumerate(tensors):
            np.save(draft / f"{n}.{p}.npy", tensor.numpy())
    draft.rename(folder)


def product_scale(func: tirx.PrimFunc) -> float:
    """Return the factor for drawn tensors that makes sums of products of two of them about as large as 1.

    Networks have sums of this size. Larger sums, of the size of sqrt(n), squashed into the range of a tanh,
    would be judged by that range and not by their own. The variance of n products of two factors of variance
    v is n v^2.
    """
    terms = max((one.terms for one in reductions(func) if one.product), default=1)
    return float(terms**-0.25)


def _draw(
    rng: np.random.Generator, value: MemoryValue, n: int, values: tuple[MemoryValue, ...], scale: float
) -> np.ndarray:
    """Draw floats of one of three distributions, or bytes; other integers are valid indices of every axis."""
    if value.dtype == "bool":
        return rng.integers(0, 2, value.shape).astype(bool)
    if value.dtype == "uint8":
        return rng.integers(0, 256, value.shape).astype(np.uint8)
    if not value.dtype.startswith("float"):
        room = min((min(v.shape) for v in values if v.shape and v is not value), default=2)
        return rng.integers(0, max(1, min(room, 100)), value.shape).astype(value.dtype)
    if n == 1:
        return rng.uniform(0.1, 1.0, value.shape).astype(value.dtype)
    drawn = rng.standard_normal(value.shape) * (scale if len(value.shape) > 1 else 1.0)
    if n == 2:
        drawn *= rng.random(value.shape) < 0.7
    return drawn.astype(value.dtype)
