"""Compiles one ONNX file to one `.honed` file: check, normalise, import, lower, prove, write."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from tvm import tirx
from tvm.target import Target

from honed.jobs.events import Fitted, FittedPart
from honed.machine.bundle import has_cpu_engine
from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.onnxfile.reading import clean
from honed.protocol import strict
from honed.protocol.errors import DeviceError, InvalidArgument, ModelRefused
from honed.protocol.values import ObservedSizes
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import (
    ROWS_MASK,
    CompiledModel,
    PrecisionChoice,
    SkippedSizes,
    SourceModel,
)
from honed.runtime.engines import HIGHEST
from honed.runtime.execution import programs
from honed.runtime.execution.programs import NotBuilt
from honed.tuner import frontend
from honed.tuner.frontend import ImportedModule, Normalised, Precision
from honed.tuner.frontend.survey import survey
from honed.tuner.graph import origins_of
from honed.tuner.lower.module import LoweredModel, UntunedKernels, lower_module
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.program import FunctionCall, Program
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.lower.workload import task_key
from honed.tuner.mixed_precision import choose
from honed.tuner.search.costmodel import import_for
from honed.tuner.verify import discontinuities
from honed.tuner.verify.evaluator import Reference, at_level, evaluate
from honed.tuner.verify.graphs import bind_shapes

from . import sized
from .form import with_room
from .fusion import FusionPolicy
from .partition import PartitionedModel, partition_model
from .partition.divide import flops
from .schedules import NOTHING, read_records, untuned_kernels
from .verification import VerificationResult, Verifier, expect, read_probe_inputs, with_behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prepared model; `normalised` derives from `source`, the `whole` model where `cut` is None."""

    whole: onnx.ModelProto
    source: onnx.ModelProto
    normalised: Normalised
    cut: PartitionedModel | None


def prepare(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    precision: Precision,
    profile: DeviceProfile,
    unbuilt: Mapping[str, str] = MappingProxyType({}),
) -> Prepared:
    """Normalise a checked model for a device, and partition it where it cannot be compiled whole.

    Partitions need the CPU engine. `unbuilt` maps values of the normalised graph to the reason why the driver
    builds no kernel for them. Raises as `frontend.normalise` does, and adds the reason why the model was not
    cut. A decoder's form has one more input (`form.with_room`).
    """
    if ROWS_MASK in shapes:
        model = with_room(model, shapes)
    normalised = partial(frontend.normalise, shapes=shapes, precision=precision, profile=profile)
    try:
        whole = normalised(model)
        if not unbuilt:
            return Prepared(whole=model, source=model, normalised=whole, cut=None)
        refused = _unbuildable(unbuilt)
    except ModelRefused as error:
        refused = error
    if not has_cpu_engine():
        raise refused
    made = partition_model(model, shapes, unbuilt=unbuilt)
    if isinstance(made, str):
        raise ModelRefused(str(refused), (*refused.reasons, made)) if made else refused
    try:
        rest = normalised(made.program, parts=made.between)
    except ModelRefused as again:
        why = f"it is not cut in parts: {again}"
        raise ModelRefused(str(refused), (*refused.reasons, why)) from again
    if not made.parts:
        return Prepared(whole=model, source=model, normalised=rest, cut=None)
    nodes = made.nodes + sum(part.nodes for part in made.parts)
    parts = "one part" if len(made.parts) == 1 else f"{len(made.parts)} parts"
    note = (
        f"{made.nodes} of {nodes} nodes and {made.share:.1%} of the operations are compiled; "
        f"the CPU engine runs the rest, {parts}"
    )
    noted = replace(rest, notes=(*rest.notes, note))
    return Prepared(whole=model, source=made.source, normalised=noted, cut=made)


def _unbuildable(unbuilt: Mapping[str, str]) -> ModelRefused:
    return ModelRefused(
        "the device's driver does not build kernels of the model, with no schedule; update the driver",
        tuple(dict.fromkeys(unbuilt.values())),
    )


def read_existing_build(like: Path | None, prepared: Prepared, precision: Precision) -> CompiledModel | None:
    """Return the header of `like`, an earlier compiled model of this model, or None.

    None where there is no such model, or where it does not matter: the model is not partitioned and the
    precision is not "auto".
    """
    if like is None or (precision != "auto" and prepared.cut is None):
        return None
    with modelfile.read(like, verify=False) as file:
        return file.model


STAGES = ("check", "normalise", "import", "lower", "prove", "write")
# Start of each stage as a share of the whole, as for LightGlue-192; only progress bars depend on it.
_STARTS = (0.0, 0.05, 0.2, 0.3, 0.6, 0.97, 1.0)

_MAX_REASON = 500  # Characters of the reason why a partition is not compiled for sizes
_PRODUCTS = frozenset({"Conv", "ConvInteger", "MatMul", "MatMulInteger"})
Report = Callable[[str, float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """A request to compile a file for a device.

    `device` is where the compiled form is compared with the reference; None: this machine has no such
    device, and the comparison is left to the machine that serves the model.
    """

    path: Path
    output: Path
    profile: DeviceProfile
    device: Device | None
    shapes: Mapping[str, tuple[int, ...]]
    precision: Precision
    filename: str  # The user's name of the file
    records: Path | None = None  # Recorded schedules to compile with
    calibration: Path | None = None  # A folder of inputs that errors in fp16 are measured on
    # A compiled form of the same model, whose choice of precision is reused
    existing_build: Path | None = None
    processes: int = 0  # Forked to lower functions; see `ForkPool` for when a process may be
    sizes: tuple[ObservedSizes, ...] = ()  # Observed sizes, as in `honed.jobs.commands.Compile`
    keep_slower: bool = False  # Keeps slower size specialisations, and a whole model that is slower


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """The compiled model's header, and the reason of each attempt after the first.

    `fell_back` is the reason why default rules alone scheduled it, "" where they did not.
    """

    model: CompiledModel
    reasons: tuple[str, ...]
    fell_back: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The choices of one attempt to compile a model, and `why` it follows another; "" for the first.

    `unbuilt` is as in `prepare`. `own` has the model computed in its own types, where fp16 was chosen.
    Default rules schedule the tasks that are `refused`, each with the driver's complaint about another
    schedule, or with `rules` all tasks.
    """

    why: str = ""
    unbuilt: Mapping[str, str] = field(default_factory=dict)
    own: PrecisionChoice | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    rules: bool = False

    def first(self) -> UntunedKernels:
        """Return the function that schedules functions without a record."""
        return default_kernels if self.rules else partial(untuned_kernels, traces_by_form={})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A model as it is lowered, and its verifier; recipes with equal `unbuilt` and `own` share it."""

    prepared: Prepared
    existing_build: CompiledModel | None
    prover: Verifier
    imported: ImportedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """The result of a recipe: a compiled form with its errors, or kernels that the driver does not build."""

    recipe: Recipe
    source: _Source
    lowered: LoweredModel
    result: VerificationResult | NotBuilt


def compile_file(request: CompileRequest, report: Report) -> CompileResult:
    """Compile, prove and write a model.

    After an attempt with wrong answers on the device, or kernels that its driver does not build, the first of
    `_REMEDIES` that has a recipe makes the next attempt. `report(stage, fraction of the whole, text)` is
    called meanwhile. Raises ModelRefused with every reason found, InvalidArgument, DeviceError or
    ResourceExhausted. The output is written whole or not at all.
    """
    stage, reasons = _Stages(report), list[str]()
    tried = _attempt(request, Recipe(), stage, None)
    while isinstance(tried.result, NotBuilt) or tried.result.why_not:
        following = next(filter(None, (remedy(request, tried) for remedy in _REMEDIES)), None)
        if following is None:
            if isinstance(tried.result, NotBuilt):
                raise tried.result
            raise tried.source.prover.refusal(tried.result, tried.recipe.first())
        stage, reasons = stage.rest(), [*reasons, following.why]
        tried = _attempt(request, following, stage, tried)
    model = _write(request, tried.source, tried.result, stage)
    fell_back = tried.recipe.why if tried.recipe.rules else ""
    return CompileResult(model=model, reasons=tuple(reasons), fell_back=fell_back)


def _attempt(request: CompileRequest, recipe: Recipe, stage: _Stages, before: _Tried | None) -> _Tried:
    """Compile a model and compare it with the reference; `before` is the attempt that failed."""
    if before is None or (before.recipe.unbuilt, before.recipe.own) != (recipe.unbuilt, recipe.own):
        source = _read(request, recipe, stage)
    else:
        source = before.source
    lowered, notes = _lower(request, recipe, source, stage), tuple[str, ...]()
    if recipe.rules:
        notes = (f"compiled with default rules, because {recipe.why}",)
        if before is not None and lowered.sources == before.lowered.sources:
            return replace(before, recipe=recipe)
    result: VerificationResult | NotBuilt
    try:
        result = source.prover.verify(lowered, recipe.first(), stage.of("prove"), 0.4, *notes)
    except NotBuilt as refused:
        result = refused
    return _Tried(recipe=recipe, source=source, lowered=lowered, result=result)


def _lower(request: CompileRequest, recipe: Recipe, source: _Source, stage: _Stages) -> LoweredModel:
    """Lower a model with recorded schedules, else with those that need no trial, else by default rules."""
    profile, refused = request.profile, recipe.refused
    lower = partial(
        lower_module,
        source.imported.module,
        profile,
        stage.of("lower"),
        names=source.imported.names,
        processes=request.processes,
    )
    if recipe.rules:
        return lower(first=recipe.first())
    known = read_records(request.records, profile) if request.records else NOTHING
    joining, picked = FusionPolicy(profile, known.times), recipe.first()
    import_for(profile.rules.family)

    def choose(task: str, func: tirx.PrimFunc) -> tuple[str, tirx.PrimFunc] | None:
        return None if task in refused else known.schedules(task, func)

    def first(
        func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile
    ) -> tuple[str, Lowered, list[str]]:
        kernels = default_kernels if refused and task_key(func) in refused else picked
        return kernels(func, name, target, profile)

    def admit(program: Program) -> None:
        if not refused:
            _admit(request, source.prover, program)

    lowered = lower(choose=choose, first=first, joins=joining, admit=admit)
    notes = [
        f"{one.name} keeps its default schedule, {profile.identity.name} does not build a better one: "
        + refused[one.task]
        for one in lowered.functions.values()
        if one.task in refused
    ]
    return replace(lowered, notes=(*lowered.notes, *joining.notes(), *notes))


def _without_refused(request: CompileRequest, tried: _Tried) -> Recipe | None:
    """Return the recipe with default rules for what the driver does not build, else without it: a partition.

    Of a product or convolution and the operators fused with it, the latter are left out: the former, which
    takes the time, may build alone. Raises ModelRefused where all of them are left out already.
    """
    recipe, lowered, name = tried.recipe, tried.lowered, request.profile.identity.name
    if not isinstance(tried.result, NotBuilt):
        return None
    assert request.device is not None  # Kernels are only built on a device
    refused = {}
    for one in lowered.functions.values():
        if not recipe.refused or one.task in recipe.refused:
            try:
                programs.build(request.device, one.source, None)
            except NotBuilt as error:
                refused[one.task] = clean(error.complaint)
    if not refused:
        return None
    if not (recipe.refused or recipe.rules):
        return replace(recipe, why=f"{name} does not build all kernels", refused=refused)
    nodes = tried.source.prepared.normalised.model.graph.node
    products = {output for node in nodes if node.op_type in _PRODUCTS for output in node.output}
    unbuilt = {}
    for call in lowered.program.calls:
        if isinstance(call, FunctionCall) and (one := lowered.functions[call.function]).task in refused:
            why = f"{name} does not build its kernel {one.name} ({refused[one.task]})"
            lesser = [value for value in call.operators if value not in products]
            unbuilt.update({value: why for made in lesser or call.operators for value in origins_of(made)})
    if unbuilt.keys() <= recipe.unbuilt.keys():
        raise _unbuildable(unbuilt or refused)
    why = f"{name} does not build all kernels, with no schedule"
    return Recipe(why=why, unbuilt={**recipe.unbuilt, **unbuilt})


def _rules_for_all(request: CompileRequest, tried: _Tried) -> Recipe | None:
    """Return the recipe with default rules alone, where better schedules give wrong answers."""
    recipe, result = tried.recipe, tried.result
    if isinstance(result, NotBuilt) or not result.wrong or recipe.rules:
        return None
    why = f"better schedules gave wrong answers on {request.profile.identity.name} ({result.wrong[0]})"
    return Recipe(why=why, unbuilt=recipe.unbuilt, own=recipe.own, rules=True)


def _own_types(request: CompileRequest, tried: _Tried) -> Recipe | None:
    """Return the recipe in the model's own types, where fp16 gives wrong answers or cannot be verified."""
    result = tried.result
    if isinstance(result, NotBuilt) or not tried.source.prover.half:
        return None
    found = "gave wrong answers" if result.wrong else "cannot be verified"
    why = f"fp16 {found} on {request.profile.identity.name} ({result.why_not})"
    return Recipe(why=why, unbuilt=tried.recipe.unbuilt, own=PrecisionChoice(half=False, why=why))


# Remedies after a failed attempt: the first of these that has a recipe is tried.
_REMEDIES = (_without_refused, _rules_for_all, _own_types)


def _write(
    request: CompileRequest, source: _Source, tried: VerificationResult, stage: _Stages
) -> CompiledModel:
    """Write a verified model, and add its partitions compiled for sizes."""
    model, cut, like = tried.with_device_errors(request.device), source.prepared.cut, source.existing_build
    stage("write", 0.0, f"write {request.output.name}")
    modelfile.write(request.output, model, tried.constants)
    if cut is None:
        return model
    sizes, left_out = sized.choose_sizes(cut, request.sizes, like)
    if not (sizes or left_out):
        return model
    keep_slower, each = request.keep_slower or sized.keeps_slower(like, request.profile), []
    for n, observed in enumerate(sizes):
        sizes_shown = ", ".join(map(str, observed.sizes))
        stage("write", (n + 1) / (len(sizes) + 2), f"compile part {observed.part} for size {sizes_shown}")
        each.append(_compile_part(request, cut, observed, keep_slower=keep_slower))
    made = [one for one in each if isinstance(one, sized.CompiledPart)]
    out = [one for one in each if isinstance(one, SkippedSizes)]
    model, more = sized.with_forms(model, tried.constants, made, [*left_out, *out])
    modelfile.write(request.output, model, tried.constants, more)
    return model


_MANY_LAUNCHES = 200  # Launches of a model that may have too many small kernels for a device
_RUNS = 8  # Runs of ONNX Runtime, of which the shortest counts


def _admit(request: CompileRequest, prover: Verifier, program: Program) -> None:
    """Raise ModelRefused where ONNX Runtime answers before the device could launch the kernels.

    The launches of streaming models with unrolled recurrences, of a few operations each, take longer than
    the operations take on a processor.
    """
    launches = sum(isinstance(call, FunctionCall) and not call.moves for call in program.calls)
    profile, device = request.profile, request.device
    units, peaks = profile.family.joined, profile.peaks
    each = peaks.launch_us if peaks is not None else units.launch_us if units is not None else 0.0
    if device is None or request.keep_slower or prover.cut is not None or launches < _MANY_LAUNCHES:
        return
    sets = [prover.expected.inputs[0]] * _RUNS
    found = evaluate(prover.bound, sets, evaluators=[at_level(HIGHEST)])
    least = 1e-6 * each * launches
    if isinstance(found, Reference) and found.seconds < least:
        raise ModelRefused(
            "the model stays with ONNX Runtime, which answers before this device could launch its kernels",
            (
                f"{launches:,} launches take at least {1e3 * least:.1f} ms on {profile.identity.name}, "
                f"and ONNX Runtime takes {1e3 * found.seconds:.2f} ms for all of the model",
            ),
        )


def _compile_part(
    request: CompileRequest, cut: PartitionedModel, observed: ObservedSizes, *, keep_slower: bool
) -> sized.CompiledPart | SkippedSizes:
    """Compile and verify a partition as a model of its own, and time it where there is a device.

    Return the sizes as skipped where it cannot be compiled, is wrong, or slower.
    """

    def leave_out(why: str) -> SkippedSizes:
        return SkippedSizes(part=observed.part, sizes=observed.sizes, why=why)

    with tempfile.TemporaryDirectory(prefix="honed-part-") as folder:
        path, output = Path(folder) / "part.onnx", Path(folder) / "part.honed"
        onnx.save(cut.parts[observed.part].model, path)
        own = replace(
            request,
            path=path,
            output=output,
            shapes=sized.shapes_of(cut, observed),
            precision=sized.precision(request.precision),
            calibration=None,
            existing_build=None,
            sizes=(),
        )
        times, least = None, 0
        try:
            compile_file(own, lambda stage, done, text: None)
            if request.device is not None:
                timed = sized.in_turns(
                    request.output, observed.part, output, request.device, keep_slower=keep_slower
                )
                if timed.why_not:
                    return leave_out(timed.why_not)
                times, least = timed.times, timed.least
        except (ModelRefused, InvalidArgument, DeviceError) as refused:
            why = "; ".join((str(refused), *getattr(refused, "reasons", ())))
            return leave_out(f"it cannot be compiled: {why}"[:_MAX_REASON])
        with modelfile.read(output, verify=False) as file:
            if file.model.split is not None:
                return leave_out("it cannot be compiled whole")
            indices = (i for i, b in enumerate(file.model.buffers) if b.place == "constant")
            constants = {i: np.array(file.constant(i)) for i in indices}
            return sized.CompiledPart(
                observed=observed, model=file.model, constants=constants, times=times, least=least
            )


def _prepare(request: CompileRequest, stage: _Stages, unbuilt: Mapping[str, str]) -> Prepared:
    stage("check", 0.0, f"read {request.filename}")
    model = frontend.load(request.path)
    stage("normalise", 0.0, "normalise the graph and fold constants")
    return prepare(model, request.shapes, request.precision, request.profile, unbuilt)


def _import(normalised: Normalised, stage: _Stages) -> ImportedModule:
    stage("import", 0.0, "import into the compiler")
    return frontend.import_named(normalised)


def _read(request: CompileRequest, recipe: Recipe, stage: _Stages) -> _Source:
    """Prepare a model, choose a precision and probes, and evaluate the reference.

    Inputs that the user gave are probes, also those that the model was compiled with before. Raises
    ModelRefused where nothing can be verified by the reference.
    """
    prepared = _prepare(request, stage, recipe.unbuilt)
    like, choice = read_existing_build(request.existing_build, prepared, request.precision), recipe.own
    if request.precision == "auto" and choice is None:
        stage("normalise", 0.5, "find out what can be computed in fp16")
        choice = choose.decide(
            prepared.source,
            prepared.normalised,
            request.profile,
            calibration=request.calibration,
            like=like,
        )
    normalised = prepared.normalised if choice is None else choose.apply(choice, prepared.normalised)
    # Evaluated before the long work, because it may refuse the model
    stage("import", 0.0, "evaluate the reference")
    shapes = {i.name: i.shape for i in normalised.inputs}
    bound = bind_shapes(prepared.source, shapes)
    whole = bind_shapes(prepared.whole, shapes) if prepared.cut is not None else None
    given = (
        choose.calibration_sets(request.calibration, normalised.inputs)
        if request.calibration is not None
        else read_probe_inputs(request.existing_build, normalised)
        if like is not None
        else ()
    )
    half, in_parts = choice is not None and choice.half, prepared.cut is not None and prepared.cut.between
    judged = request.device is not None and not half and not in_parts
    expected = expect(bound, normalised, given, whole, discontinuities.quantising(bound) if judged else None)
    if prepared.cut is not None and prepared.cut.tail and whole is not None:
        expected = with_behind(expected, prepared.cut, whole)
    with request.path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    prover = strict.copy_fields(
        Verifier,
        request,
        "quantised",
        source=strict.copy_fields(
            SourceModel, normalised, sha256=sha256, filename=request.filename, choice=choice
        ),
        normalised=normalised,
        cut=prepared.cut,
        expected=expected,
        bound=bound,
    )
    return _Source(
        prepared=prepared,
        existing_build=like,
        prover=prover.with_quantised(),
        imported=_import(normalised, stage),
    )


def check_file(request: CompileRequest, report: Report) -> None:
    """Check for nearly all reasons to refuse a model, far faster than compiling; raise as compiling does."""
    stage = _Stages(report)
    _import(_prepare(request, stage, {}).normalised, stage)


def fit_file(request: CompileRequest) -> Fitted:
    """Return what would run on which engine, without generating a kernel.

    Flops are 0 where sizes are dynamic.

    Raises ModelRefused or InvalidArgument for a file that is not a valid model.
    """
    model = frontend.load(request.path)
    found = survey(model, request.shapes)
    work = 0 if found is None else sum(flops(each.node, found.observed) for each in found.nodes)
    parts: tuple[FittedPart, ...] = (FittedPart(engine="gpu", nodes=len(model.graph.node), flops=work),)
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    try:
        prepared = prepare(model, request.shapes, request.precision, request.profile)
    except ModelRefused as refused:
        reasons = refused.reasons or (str(refused),)
        parts = (replace(parts[0], engine="cpu"),)
    else:
        notes = prepared.normalised.notes
        if (made := prepared.cut) is not None:
            compiled = FittedPart(engine="gpu", nodes=made.nodes, flops=made.flops)
            parts = (compiled, *(strict.copy_fields(FittedPart, part, engine="cpu") for part in made.parts))
    return Fitted(
        parts=parts,
        reasons=reasons,
        notes=notes,
        inputs=tuple(map(_describe, model.graph.input)),
        outputs=tuple(map(_describe, model.graph.output)),
        nbytes=model.ByteSize(),
        cpu_engine=has_cpu_engine(),
    )


def _describe(value: onnx.ValueInfoProto) -> str:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return f"{value.name}: {(kind or 'nothing').removesuffix('_type')}"
    tensor = value.type.tensor_type
    sizes = (d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in tensor.shape.dim)
    return f"{value.name}: {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()} [{', '.join(sizes)}]"


class _Stages:
    """A converter of progress within a stage to progress of the whole."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __call__(self, stage: str, fraction: float, text: str) -> None:
        n = STAGES.index(stage)
        self.report(stage, _STARTS[n] + fraction * (_STARTS[n + 1] - _STARTS[n]), text)

    def of(self, stage: str, start: float = 0.0, share: float = 1.0) -> Callable[[float, str], None]:
        """Return a function that reports a stage, or the `share` of it that begins at `start`."""
        return lambda done, text: self(stage, start + share * done, text)

    def rest(self) -> _Stages:
        """Return stages that report another compilation as the rest of the proof."""
        tell = self.of("prove", 0.9, 0.1)
        return _Stages(lambda _stage, done, text: tell(done, text))
