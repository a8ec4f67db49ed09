"""One ONNX file to one `.honed` file: check, normalise, import, lower, prove, write."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from honed.protocol.errors import ModelRefused
from honed.runtime import modelfile, proof
from honed.runtime.cpuparts import CpuParts
from honed.runtime.devices import Device
from honed.runtime.executor import Executor
from honed.runtime.model import Choice, CompiledModel, Source
from honed.runtime.partlimits import PROVING_MIB, PartLimits
from honed.runtime.profile import DeviceProfile

from . import frontend
from .assemble import Expected, assemble
from .attend import joins
from .bind import bind_shapes
from .cut import header
from .first import first_kernels
from .frontend import ImportedModule, Normalised, Precision
from .lower.module import First, LoweredModel, lower_module
from .lower.schedule import default_kernels
from .mixed import choose
from .prepare import Prepared, prepare
from .prove import locate, probes, reference, steps
from .tuned import NOTHING, Recorded, recorded

STAGES = ("check", "normalise", "import", "lower", "prove", "write")
# Where each stage starts in the whole, as LightGlue-192 spends its time; only progress bars depend on it.
_STARTS = (0.0, 0.05, 0.2, 0.3, 0.6, 0.97, 1.0)
_PROBES = 3
# The file carries its probes; where they are larger than this, it carries one only.
_PROBE_BYTES = 64 << 20

Report = Callable[[str, float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
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
    calibration: Path | None = None  # a folder of inputs that errors in fp16 are measured on
    like: Path | None = None  # a compiled form of the same model: its choice of precision is taken
    processes: int = 0  # forked to lower functions; see `forked.Forked` for when a process may be


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """What the file says; `fell_back` is why default rules alone made it, "" where they did not have to."""

    model: CompiledModel
    fell_back: str


def compile_file(request: CompileRequest, report: Report) -> CompileResult:
    """Compile, prove and write a model.

    Where schedules recorded or picked by the prior give wrong answers on the device, default rules replace
    them all, which the file's notes say. `report(stage, fraction of the whole, text)` is called meanwhile.
    Raises ModelRefused with every reason found, InvalidArgument, DeviceError or ResourceExhausted. The output
    is written whole or not at all.
    """
    stage = _Stages(report)
    stage("check", 0.0, f"read {request.filename}")
    original = frontend.load(request.path)
    prepared = _prepare(original, request, stage)
    choice = None
    if request.precision == "auto":
        stage("normalise", 0.5, "find out what can be computed in fp16")
        choice = choose.decide(
            prepared.given,
            prepared.normalised,
            request.profile,
            calibration=request.calibration,
            like=request.like,
        )
    return _compile(request, original, prepared, choice, stage)


def _compile(
    request: CompileRequest,
    original: onnx.ModelProto,
    prepared: Prepared,
    choice: Choice | None,
    stage: _Stages,
) -> CompileResult:
    """Compile with a choice of precision; where fp16 gives wrong answers, in the model's own types."""
    own, made = prepared.normalised, prepared.cut
    normalised = choose.applied(choice, own) if choice is not None else own
    imported = _import(normalised, stage)
    known = recorded(request.records, request.profile.identity) if request.records else NOTHING
    lowered = _lower(imported, request.profile, stage, known, first_kernels, request.processes)
    stage("prove", 0.0, "evaluate the reference")
    shapes = {i.name: i.shape for i in normalised.inputs}
    bound = bind_shapes(prepared.given, shapes)
    expected, notes = _expect(bound, normalised)
    if made is not None:
        expected = header.with_behind(expected, made, bind_shapes(original, shapes))
    sha256 = _sha256(request.path)

    def attempt(lowered: LoweredModel, first: First, done: float, *more: str) -> _Attempt:
        def assembled(expected: Expected, *more: str) -> _Assembled:
            source = Source(
                sha256=sha256,
                filename=request.filename,
                producer=normalised.producer,
                opset=normalised.opset,
                precision=normalised.precision,
                notes=(*normalised.notes, *lowered.notes, *notes, *more),
                choice=choice,
            )
            return assemble(source, request.profile, normalised, lowered, expected, made)

        form = assembled(expected, *more)
        if request.device is None:
            return _Attempt(*form)
        stage("prove", done, f"compare with {expected.evaluator} on {request.device.profile.identity.name}")
        results = _probed(request.device, *form)
        tried = _Attempt(*form, results=results)
        if not tried.wrong or (choice is not None and choice.half) or (made is not None and made.between):
            return tried
        stage("prove", done + 0.05, f"compare part by part on {request.device.profile.identity.name}")
        apart = _by_parts(request, request.device, tried, bound, expected, first)
        if apart is None or apart.wrong is not None:
            return replace(tried, apart=apart)
        allowed = replace(expected, tolerance=apart.tolerance)
        results = steps.judged(results, apart.tolerance)
        return _Attempt(*assembled(allowed, *more, apart.note), results=results, apart=apart)

    tried, first, fell_back = attempt(lowered, first_kernels, 0.4), first_kernels, ""
    device = request.device
    if tried.wrong and (by_rules := _by_rules(lowered, imported, request, stage)) is not None:
        fell_back = (
            f"better schedules gave wrong answers on {request.profile.identity.name} ({tried.wrong[0]})"
        )
        why = f"compiled with default rules, because {fell_back}"
        tried, first = attempt(by_rules, default_kernels, 0.8, why), default_kernels
    if tried.wrong and choice is not None and choice.half:
        why = f"fp16 gave wrong answers on {request.profile.identity.name} ({tried.wrong[0]})"
        return _compile(request, original, prepared, Choice(half=False, why=why), stage.rest())
    if tried.wrong and made is not None and made.between:
        raise _wrong(tried, "which node is wrong is not looked for in a model of several parts")
    if tried.wrong and device is not None:
        raise _refusal(request, device, tried, bound, expected, first)
    model = tried.model if device is None else _proven(tried.model, device, tried.results)
    stage("write", 0.0, f"write {request.output.name}")
    modelfile.write(request.output, model, tried.constants)
    return CompileResult(model=model, fell_back=fell_back)


_Assembled = tuple[CompiledModel, Mapping[int, np.ndarray]]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A compiled form, how far off its probes are, and what a proof part by part found, where they were."""

    model: CompiledModel
    constants: Mapping[int, np.ndarray]
    results: tuple[proof.Difference, ...] = ()
    apart: steps.ProofByParts | None = None

    @property
    def wrong(self) -> tuple[proof.Difference, ...]:
        return tuple(result for result in self.results if not result.right)


def check_file(request: CompileRequest, report: Report) -> None:
    """Do what finds nearly all that a model is refused for, in a small part of the time; raises likewise."""
    stage = _Stages(report)
    stage("check", 0.0, f"read {request.filename}")
    _import(_prepare(frontend.load(request.path), request, stage).normalised, stage)


def run_model(
    model: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
    device: Device,
    precision: Precision = "auto",
    first: First = first_kernels,
) -> dict[str, np.ndarray]:
    """Compile a model of static shapes with schedules that need no trial, and run it once, unproven.

    Computes in the model's own types where the precision is "auto".
    Raises as above.
    """
    return _run(model, [inputs], device, precision, first, 0)[0]


def _run(
    model: onnx.ModelProto,
    inputs: Sequence[Mapping[str, np.ndarray]],
    device: Device,
    precision: Precision,
    first: First,
    processes: int,
) -> list[dict[str, np.ndarray]]:
    """The same with several sets of inputs."""
    quiet = _Stages(lambda _stage, _done, _text: None)
    limits = device.profile.limits
    normalised = frontend.normalise(model, precision=precision, fp16=limits.fp16, fp64=limits.fp64)
    lowered = _lower(_import(normalised, quiet), device.profile, quiet, NOTHING, first, processes)
    source = Source(
        sha256=hashlib.sha256(model.SerializeToString()).hexdigest(),
        filename="(in memory)",
        producer=normalised.producer,
        opset=normalised.opset,
        precision=normalised.precision,
        notes=(),
    )
    compiled, constants = assemble(source, device.profile, normalised, lowered, None)
    with opened(compiled, constants, device) as executor:
        return [executor.run(each) for each in inputs]


class _Stages:
    """Turns progress within a stage into progress of the whole."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __call__(self, stage: str, fraction: float, text: str) -> None:
        n = STAGES.index(stage)
        self.report(stage, _STARTS[n] + fraction * (_STARTS[n + 1] - _STARTS[n]), text)

    def rest(self) -> _Stages:
        """Another compilation as the rest of the proof."""
        return _Stages(lambda _stage, done, text: self("prove", 0.9 + 0.1 * done, text))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _prepare(model: onnx.ModelProto, request: CompileRequest, stage: _Stages) -> Prepared:
    stage("normalise", 0.0, "normalise the graph and fold constants")
    return prepare(model, request.shapes, request.precision, request.profile)


def _import(normalised: Normalised, stage: _Stages) -> ImportedModule:
    stage("import", 0.0, "import into the compiler")
    return frontend.import_named(normalised)


def _lower(
    given: ImportedModule,
    profile: DeviceProfile,
    stage: _Stages,
    known: Recorded,
    first: First,
    processes: int = 0,
) -> LoweredModel:
    def progress(done: float, text: str) -> None:
        stage("lower", done, text)

    joining = joins(profile, known.times)
    lowered = lower_module(
        given.module, profile, progress, known.schedules, first, given.names, processes, joining
    )
    return replace(lowered, notes=(*lowered.notes, *joining.notes()))


def _by_rules(
    lowered: LoweredModel, given: ImportedModule, request: CompileRequest, stage: _Stages
) -> LoweredModel | None:
    """The model with default rules alone; None where it has no other kernels already."""

    def progress(done: float, text: str) -> None:
        stage("prove", 0.5 + 0.3 * done, text)

    plain = lower_module(
        given.module,
        request.profile,
        progress,
        first=default_kernels,
        names=given.names,
        processes=request.processes,
    )
    found, before = ({name: f.source for name, f in one.functions.items()} for one in (plain, lowered))
    return None if found == before else plain


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


def opened(model: CompiledModel, constants: Mapping[int, np.ndarray], device: Device) -> Executor:
    """An executor over a file that is gone when the executor is closed."""
    with tempfile.TemporaryDirectory(prefix="honed-") as folder:
        path = Path(folder) / "draft.honed"
        modelfile.write(path, model, constants)
        parts = CpuParts(PartLimits(memory_mib=PROVING_MIB))
        return Executor(modelfile.read(path, verify=False), device, parts=parts)


def _probed(
    device: Device, model: CompiledModel, constants: Mapping[int, np.ndarray]
) -> tuple[proof.Difference, ...]:
    with opened(model, constants, device) as executor:
        probes = model.proof.probes if model.proof is not None else ()
        behind = [found for probe in probes for found in proof.check_behind(executor, probe)]
        if wrong := tuple(str(found) for found in behind if not found.right):
            raise ModelRefused(
                "the part that the CPU engine is to run last does not give the reference's answers on the "
                f"reference's own values ({wrong[0]})",
                wrong,
            )
        return proof.check_probes(executor)


def _by_parts(
    request: CompileRequest,
    device: Device,
    tried: _Attempt,
    bound: onnx.ModelProto,
    expected: Expected,
    first: First,
) -> steps.ProofByParts | None:
    """What a model whose probes are wrong is proven to instead; None where it has no steps."""
    return steps.judge(
        bound,
        expected.inputs,
        lambda variant, given: _run(variant, given, device, request.precision, first, request.processes),
        precision=tried.model.source.precision,
        tolerance=expected.tolerance,
    )


def _refusal(
    request: CompileRequest,
    device: Device,
    tried: _Attempt,
    bound: onnx.ModelProto,
    expected: Expected,
    first: First,
) -> ModelRefused:
    """Of a model with wrong answers: names the first node whose value differs."""
    worst = next(n for n, result in enumerate(tried.results) if not result.right)
    if tried.apart is not None:
        where = tried.apart.wrong or "each part is right, and its steps do not explain as much"
    else:
        located = locate.first_difference(
            bound,
            expected.inputs[worst // len(tried.model.outputs)],
            lambda variant, given: run_model(variant, given, device, request.precision, first),
            precision=tried.model.source.precision,
        )
        where = str(located)
    return _wrong(tried, where)


def _wrong(tried: _Attempt, where: str) -> ModelRefused:
    return ModelRefused(
        f"the compiled model does not give the reference's answers ({tried.wrong[0]}); {where}",
        (*map(str, tried.wrong), where),
    )


def _proven(model: CompiledModel, device: Device, results: tuple[proof.Difference, ...]) -> CompiledModel:
    worst = {
        output.name: max((r.error for r in results if r.output == output.name), default=0.0)
        for output in model.outputs
    }
    assert model.proof is not None
    done = replace(model.proof, device=device.profile.identity.name, error=tuple(worst.values()))
    return replace(model, proof=done)
