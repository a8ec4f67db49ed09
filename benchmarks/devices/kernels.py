"""The Valhall bench's tasks as compiled files of one function each, with probes, for any device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from benchmarks.valhall.draws import draws
from benchmarks.valhall.tasks import BenchTask, profile, tasks
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import SourceModel
from honed.tuner.compiler.assemble import assemble
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.frontend import Normalised, Precision, StaticTensorSpec
from honed.tuner.lower.module import LoweredModel
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.program import Function, FunctionCall, Program
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Workload
from honed.tuner.tune.extract import workload
from honed.tuner.verify.probes import ReferenceProbes

_ALIGNMENT = 512  # Bytes: what the strictest of the drivers here wants of sub-buffers
_SEED = 1


@dataclass(frozen=True, slots=True)
class Made:
    """A compiled file: its task and schedule, and the allowed error of its output."""

    task: str
    precision: Precision
    schedule: str
    tolerance: float


def mali() -> DeviceProfile:
    """Return the bench's Mali-G610, with buffers that other devices can have, too."""
    one = profile()
    return replace(one, limits=replace(one.limits, base_align_bytes=_ALIGNMENT))


def write(folder: Path, precision: Precision, only: str, count: int) -> Iterator[Made]:
    """Write each task's first served schedule and `count` draws of each sketch, by order of name."""
    device = mali()
    for n, task in enumerate(one for one in tasks(precision) if only in one.name):
        load = workload(
            task.name, task.func, len(task.workload.outputs), folder / f"{precision}-{n:02}", _SEED
        )
        for k, (schedule, lowered) in enumerate(_schedules(task, device, count)):
            write_one(folder / f"{precision}-{n:02}-{k:03}.honed", load, schedule, lowered, device)
            yield Made(task.name, precision, schedule, max(load.tolerance))


def _schedules(task: BenchTask, device: DeviceProfile, count: int) -> Iterator[tuple[str, Lowered]]:
    origin, lowered, _ = untuned_kernels(task.func, "main", target_for(device), device)
    yield origin, lowered
    for drawn in draws(task.func, device, count):
        yield f"sketch {drawn.draw.sketch}", drawn.lowered


def write_one(path: Path, load: Workload, schedule: str, lowered: Lowered, device: DeviceProfile) -> None:
    """Write one schedule of a function as a compiled model whose probes are the workload's sets."""
    specs = [
        StaticTensorSpec(name=f"p{n}", dtype=v.dtype, shape=v.shape) for n, v in enumerate(load.parameters)
    ]
    signature = Normalised(
        model=onnx.ModelProto(),
        inputs=tuple(spec for n, spec in enumerate(specs) if n not in load.outputs),
        outputs=tuple(specs[n] for n in load.outputs),
        notes=(),
        precision="fp16" if load.half else "fp32",
        opset=0,
        producer="benchmarks.devices",
        applied=(),
    )
    source = SourceModel(
        sha256=hashlib.sha256(lowered.source.encode()).hexdigest(),
        filename=path.name,
        producer=signature.producer,
        opset=signature.opset,
        precision=signature.precision,
        notes=(),
    )
    model, constants = assemble(
        source, device, signature, _program(load, schedule, lowered), _expected(load, signature)
    )
    modelfile.write(path, model, constants)


def _program(load: Workload, schedule: str, lowered: Lowered) -> LoweredModel:
    """Return the function as a model of one call."""
    outputs = load.outputs
    inputs = tuple(n for n in range(len(load.parameters)) if n not in outputs)
    function = Function(
        name="main",
        task=load.task,
        schedule=schedule,
        source=lowered.source,
        inner=lowered.inner,
        launches=lowered.launches,
    )
    program = Program(
        values=load.parameters,
        inputs=inputs,
        outputs=outputs,
        output_shapes=tuple(load.parameters[n].shape for n in outputs),
        calls=(FunctionCall(function="main", inputs=inputs, outputs=outputs),),
    )
    return LoweredModel(program=program, functions={"main": function}, notes=())


def _expected(load: Workload, signature: Normalised) -> ReferenceProbes:
    """Return the sets of inputs that candidates are checked with, as probes."""

    def arrays(number: int, specs: tuple[StaticTensorSpec, ...]) -> dict[str, np.ndarray]:
        return {spec.name: np.load(load.folder / f"{number}.{spec.name[1:]}.npy") for spec in specs}

    return ReferenceProbes(
        evaluator="TVM, unscheduled",
        inputs=tuple(arrays(n, signature.inputs) for n in range(load.sets)),
        outputs=tuple(arrays(n, signature.outputs) for n in range(load.sets)),
        tolerance=load.tolerance,
    )
