"""One ONNX file to one `.honed` file: check, normalise, import, lower, prove, write."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import tvm

from honed.runtime import modelfile, proof
from honed.runtime.devices import Device
from honed.runtime.errors import ModelRefused
from honed.runtime.executor import Executor
from honed.runtime.model import CompiledModel, Source
from honed.runtime.profile import DeviceProfile

from . import frontend
from .assemble import Expected, assemble
from .bind import bind_shapes
from .first import first_kernels
from .frontend import Normalised, Precision
from .lower.module import Choose, LoweredModel, lower_module
from .prove import locate, probes, reference
from .tuned import best_schedules

STAGES = ("check", "normalise", "import", "lower", "prove", "write")
# Where each stage starts in the whole, as LightGlue-192 spends its time; only progress bars depend on it.
_STARTS = (0.0, 0.05, 0.2, 0.3, 0.6, 0.97, 1.0)
_PROBES = 3
# The file carries its probes; where they are larger than this, it carries one only.
_PROBE_BYTES = 64 << 20

Report = Callable[[str, float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to compile, and for what.

    `device` is where the compiled form is compared with the reference; None: this machine has no such
    device, and the comparison is left to the machine that serves the model.
    """

    path: Path
    output: Path
    profile: DeviceProfile
    device: Device | None
    shapes: Mapping[str, tuple[int, ...]]
    precision: Precision
    filename: str  # as the user knows it
    records: Path | None = None  # recorded schedules to compile with


def compile_file(request: Request, report: Report) -> CompiledModel:
    """Compile, prove and write a model; returns what the file says.

    `report(stage, fraction of the whole, text)` is called as it goes on. Raises ModelRefused with every
    reason found, InvalidArgument, DeviceError or ResourceExhausted. The output is written whole or not
    at all.
    """
    stage = _Stages(report)
    stage("check", 0.0, f"read {request.filename}")
    original = frontend.load(request.path)
    sha256 = _sha256(request.path)
    choose = best_schedules(request.records, request.profile.identity) if request.records else _default
    normalised, lowered = _lower(original, request.profile, request.shapes, request.precision, stage, choose)
    stage("prove", 0.0, "evaluate the reference")
    bound = bind_shapes(original, {i.name: i.shape for i in normalised.inputs})
    expected, notes = _expect(bound, normalised)
    source = Source(
        sha256=sha256,
        filename=request.filename,
        producer=normalised.producer,
        opset=normalised.opset,
        precision=normalised.precision,
        notes=(*normalised.notes, *lowered.notes, *notes),
    )
    model, constants = assemble(source, request.profile, normalised, lowered, expected)
    if request.device is not None:
        stage("prove", 0.5, f"compare with {expected.evaluator} on {request.device.profile.identity.name}")
        model = _prove(request, request.device, model, constants, bound, expected)
    stage("write", 0.0, f"write {request.output.name}")
    modelfile.write(request.output, model, constants)
    return model


def check_file(request: Request, report: Report) -> None:
    """Do what finds nearly all that a model is refused for, in a small part of the time; raises likewise."""
    stage = _Stages(report)
    stage("check", 0.0, f"read {request.filename}")
    _import(frontend.load(request.path), request.profile, request.shapes, request.precision, stage)


def run_model(
    model: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
    device: Device,
    precision: Precision = "auto",
) -> dict[str, np.ndarray]:
    """Compile a model of static shapes with schedules that need no trial, and run it once, unproven.

    Raises as above.
    """
    quiet = _Stages(lambda _stage, _done, _text: None)
    normalised, lowered = _lower(model, device.profile, {}, precision, quiet, _default)
    source = Source(
        sha256=hashlib.sha256(model.SerializeToString()).hexdigest(),
        filename="(in memory)",
        producer=normalised.producer,
        opset=normalised.opset,
        precision=normalised.precision,
        notes=(),
    )
    compiled, constants = assemble(source, device.profile, normalised, lowered, None)
    with _opened(compiled, constants, device) as executor:
        return executor.run(inputs)


def _default(_task: str, _func: object) -> None:
    """Choose default schedules."""


class _Stages:
    """Turns progress within a stage into progress of the whole."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __call__(self, stage: str, fraction: float, text: str) -> None:
        n = STAGES.index(stage)
        self.report(stage, _STARTS[n] + fraction * (_STARTS[n + 1] - _STARTS[n]), text)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _import(
    model: onnx.ModelProto,
    profile: DeviceProfile,
    shapes: Mapping[str, tuple[int, ...]],
    precision: Precision,
    stage: _Stages,
) -> tuple[Normalised, tvm.IRModule]:
    stage("normalise", 0.0, "normalise the graph and fold constants")
    normalised = frontend.normalise(
        model, shapes=shapes, precision=precision, fp16=profile.limits.fp16, fp64=profile.limits.fp64
    )
    stage("import", 0.0, "import into the compiler")
    return normalised, frontend.import_relax(normalised)


def _lower(
    model: onnx.ModelProto,
    profile: DeviceProfile,
    shapes: Mapping[str, tuple[int, ...]],
    precision: Precision,
    stage: _Stages,
    choose: Choose,
) -> tuple[Normalised, LoweredModel]:
    normalised, module = _import(model, profile, shapes, precision, stage)
    return normalised, lower_module(
        module, profile, lambda done, text: stage("lower", done, text), choose, first_kernels
    )


def _expect(bound: onnx.ModelProto, normalised: Normalised) -> tuple[Expected, tuple[str, ...]]:
    """Choose probes and evaluate the reference; raises ModelRefused where it cannot be evaluated."""
    size = sum(math.prod(s.shape) * s.numpy.itemsize for s in (*normalised.inputs, *normalised.outputs))
    count = _PROBES if size * _PROBES <= _PROBE_BYTES else 1
    found = probes.choose(bound, count, normalised.precision)
    if isinstance(found, reference.ReferenceFailure):
        raise ModelRefused(
            f"the model's answers cannot be proven right, so it is not served: {found.reason}",
            (found.reason,),
        )
    expected = Expected(
        evaluator=found.evaluator,
        inputs=found.inputs,
        outputs=found.outputs,
        tolerance=found.tolerance,
    )
    return expected, found.notes


def _opened(model: CompiledModel, constants: Mapping[int, np.ndarray], device: Device) -> Executor:
    """An executor over a file that is gone when the executor is closed."""
    with tempfile.TemporaryDirectory(prefix="honed-") as folder:
        path = Path(folder) / "draft.honed"
        modelfile.write(path, model, constants)
        return Executor(modelfile.read(path, verify=False), device)


def _prove(
    request: Request,
    device: Device,
    model: CompiledModel,
    constants: Mapping[int, np.ndarray],
    bound: onnx.ModelProto,
    expected: Expected,
) -> CompiledModel:
    """Run the probes on the device; raises ModelRefused, naming the first node whose value differs."""
    with _opened(model, constants, device) as executor:
        results = proof.check_probes(executor)
    wrong = [n for n, result in enumerate(results) if not result.right]
    if wrong:
        where = locate.first_difference(
            bound,
            expected.inputs[wrong[0] // len(model.outputs)],
            lambda variant, given: run_model(variant, given, device, request.precision),
            precision=model.source.precision,
        )
        raise ModelRefused(
            f"the compiled model does not give the reference's answers ({results[wrong[0]]}); {where}",
            (*(str(results[n]) for n in wrong), str(where)),
        )
    worst = {
        output.name: max((r.error for r in results if r.output == output.name), default=0.0)
        for output in model.outputs
    }
    assert model.proof is not None
    done = replace(model.proof, device=device.profile.identity.name, error=tuple(worst.values()))
    return replace(model, proof=done)
