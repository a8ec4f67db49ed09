"""One ONNX file to one `.honed` file: check, normalise, import, lower, prove, write."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from honed.onnxfile.reading import shown
from honed.protocol import strict
from honed.protocol.errors import DeviceError, InvalidArgument, ModelRefused
from honed.protocol.results import ObservedSizes
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel, PrecisionChoice, SizesLeftOut, SourceModel
from honed.runtime.engines import HIGHEST
from honed.runtime.execution import programs
from honed.runtime.execution.programs import NotBuilt
from honed.tuner import frontend
from honed.tuner.frontend import ImportedModule, Normalised, Precision
from honed.tuner.frontend.survey import survey
from honed.tuner.graph import made_from
from honed.tuner.lower.module import First, LoweredModel, lower_module
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.program import FunctionCall, Program
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.lower.workload import task_key
from honed.tuner.mixed import choose
from honed.tuner.prove import discontinuities
from honed.tuner.prove.evaluator import Reference, at_level, evaluate
from honed.tuner.prove.graphs import bind_shapes
from honed.tuner.search.costmodel import import_for

from . import sized
from .form import with_room
from .fusion import joins
from .partition import Cut, cut
from .partition.divide import flops
from .proof import Prover, expect, probed_before, with_behind
from .schedules import NOTHING, first_kernels, recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`given` is what `normalised` is of, as the file has it: the `whole` model where `cut` is None.

    `unbuilt` is as in `prepare`.
    """

    whole: onnx.ModelProto
    given: onnx.ModelProto
    normalised: Normalised
    cut: Cut | None
    unbuilt: Mapping[str, str]


def prepare(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    precision: Precision,
    profile: DeviceProfile,
    unbuilt: Mapping[str, str] = MappingProxyType({}),
) -> Prepared:
    """Normalise a checked model for a device, and partition it where it cannot be compiled whole.

    Partitions need the CPU engine. `unbuilt` says by values of the normalised graph why the driver builds no
    kernel that makes them. Raises as `frontend.normalise` does, with the reason why the model was not cut
    among the reasons. A decoder's form has an input more (`form.with_room`).
    """
    model, limits = with_room(model, shapes), profile.limits
    normalised = partial(
        frontend.normalise, shapes=shapes, precision=precision, fp16=limits.fp16, fp64=limits.fp64
    )
    try:
        whole = normalised(model)
        if not unbuilt:
            return Prepared(whole=model, given=model, normalised=whole, cut=None, unbuilt=unbuilt)
        refused = _unbuildable(unbuilt)
    except ModelRefused as error:
        refused = error
    if not has_cpu_engine():
        raise refused
    made = cut(model, shapes, unbuilt=unbuilt)
    if isinstance(made, str):
        raise ModelRefused(str(refused), (*refused.reasons, made)) if made else refused
    try:
        rest = normalised(made.program, parts=made.between)
    except ModelRefused as again:
        why = f"it is not cut in parts: {again}"
        raise ModelRefused(str(refused), (*refused.reasons, why)) from again
    if not made.parts:
        return Prepared(whole=model, given=model, normalised=rest, cut=None, unbuilt=unbuilt)
    noted = replace(rest, notes=(*rest.notes, _note(made)))
    return Prepared(whole=model, given=made.given, normalised=noted, cut=made, unbuilt=unbuilt)


def _unbuildable(unbuilt: Mapping[str, str]) -> ModelRefused:
    return ModelRefused(
        "the device's driver does not build kernels of the model, with no schedule; update the driver",
        tuple(dict.fromkeys(unbuilt.values())),
    )


def compiled_before(like: Path | None, prepared: Prepared, precision: Precision) -> CompiledModel | None:
    """Return the header of `like`, an earlier compiled model of this model, or None.

    None where there is no such model, or where it does not matter: the model is not partitioned and the
    precision is not "auto".
    """
    if like is None or (precision != "auto" and prepared.cut is None):
        return None
    with modelfile.read(like, verify=False) as file:
        return file.model


def _note(made: Cut) -> str:
    nodes = made.nodes + sum(part.nodes for part in made.parts)
    parts = "one part" if len(made.parts) == 1 else f"{len(made.parts)} parts"
    return (
        f"{made.nodes} of {nodes} nodes and {made.share:.1%} of the operations are compiled; "
        f"the CPU engine runs the rest, {parts}"
    )


STAGES = ("check", "normalise", "import", "lower", "prove", "write")
# Where each stage starts in the whole, as LightGlue-192 spends its time; only progress bars depend on it.
_STARTS = (0.0, 0.05, 0.2, 0.3, 0.6, 0.97, 1.0)

_TOLD = 500  # characters of why a part is not compiled for sizes
_PRODUCTS = frozenset({"Conv", "ConvInteger", "MatMul", "MatMulInteger"})
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
    sizes: tuple[ObservedSizes, ...] = ()  # as in `honed.jobs.commands.Compile`
    slower_too: bool = False  # as in `honed.jobs.commands.Compile`; and a whole model that is


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """What the file says; `fell_back` is why default rules alone made it, "" where they did not have to."""

    model: CompiledModel
    fell_back: str


def compile_file(request: CompileRequest, report: Report) -> CompileResult:
    """Compile, prove and write a model.

    Where schedules recorded or picked by the prior give wrong answers on the device, default rules replace
    them all, which the file's notes say. Where the driver does not build a function, default rules replace
    its schedule alone; where it builds neither, the CPU engine runs what it computes.
    `report(stage, fraction of the whole, text)` is called meanwhile.
    Raises ModelRefused with every reason found, InvalidArgument, DeviceError or ResourceExhausted. The output
    is written whole or not at all.
    """
    return _compile_without(request, _Stages(report), {})


def _compile_without(request: CompileRequest, stage: _Stages, unbuilt: Mapping[str, str]) -> CompileResult:
    """Compile what is not `unbuilt`, as in `prepare`."""
    prepared = _prepare(request, stage, unbuilt)
    like, choice = compiled_before(request.like, prepared, request.precision), None
    if request.precision == "auto":
        stage("normalise", 0.5, "find out what can be computed in fp16")
        choice = choose.decide(
            prepared.given,
            prepared.normalised,
            request.profile,
            calibration=request.calibration,
            like=like,
        )
    return _compile(request, prepared, like, choice, stage)


def _compile(
    request: CompileRequest,
    prepared: Prepared,
    like: CompiledModel | None,
    choice: PrecisionChoice | None,
    stage: _Stages,
) -> CompileResult:
    """Compile with a choice of precision; where fp16 gives wrong answers, in the model's own types."""
    own, name = prepared.normalised, request.profile.identity.name
    normalised = choose.applied(choice, own) if choice is not None else own
    stage("import", 0.0, "evaluate the reference")  # before the long work, for what it refuses
    prover, tell = _prover(request, prepared, normalised, choice, like), stage.of("prove")
    imported = _import(normalised, stage)
    first: First = partial(first_kernels, known={})
    admit = partial(_admit, request, prover)
    lowered, fell_back = _lower(imported, request, stage, admit=admit), ""
    try:
        tried = prover.attempt(lowered, first, tell, 0.4)
    except NotBuilt:
        products = {o for node in own.model.graph.node if node.op_type in _PRODUCTS for o in node.output}
        lowered, unbuilt = _rebuilt(lowered, imported, products, request, stage)
        if unbuilt is None:
            raise
        if unbuilt:
            if unbuilt.keys() <= prepared.unbuilt.keys():
                raise _unbuildable(unbuilt) from None
            return _compile_without(request, stage.rest(), {**prepared.unbuilt, **unbuilt})
        tried = prover.attempt(lowered, first, tell, 0.6)
    if tried.wrong and (by_rules := _by_rules(lowered, imported, request, stage)) is not None:
        fell_back = f"better schedules gave wrong answers on {name} ({tried.wrong[0]})"
        why = f"compiled with default rules, because {fell_back}"
        tried, first = prover.attempt(by_rules, default_kernels, tell, 0.8, why), default_kernels
    if tried.why_not and prover.half:
        found = "gave wrong answers" if tried.wrong else "cannot be verified"
        why = f"fp16 {found} on {name} ({tried.why_not})"
        return _compile(request, prepared, like, PrecisionChoice(half=False, why=why), stage.rest())
    if tried.why_not:
        raise prover.refusal(tried, first)
    model = tried.proven(request.device)
    stage("write", 0.0, f"write {request.output.name}")
    modelfile.write(request.output, model, tried.constants)
    sizes, left_out = sized.wanted(prepared.cut, request.sizes, like)
    if prepared.cut is not None and (sizes or left_out):
        slower_too = request.slower_too or sized.slower_too(like, request.profile)
        each = list(_compiled_parts(request, prepared.cut, sizes, stage, slower_too=slower_too))
        made = [one for one in each if isinstance(one, sized.CompiledPart)]
        out = [one for one in each if isinstance(one, SizesLeftOut)]
        model, more = sized.with_forms(model, tried.constants, made, [*left_out, *out])
        modelfile.write(request.output, model, tried.constants, more)
    return CompileResult(model=model, fell_back=fell_back)


_MANY_LAUNCHES = 200  # of models that may be too many small kernels for a device
_RUNS = 8  # of ONNX Runtime, of which the shortest counts


def _admit(request: CompileRequest, prover: Prover, program: Program) -> None:
    """Raise ModelRefused where ONNX Runtime answers before the device could launch the kernels.

    The launches of streaming models with unrolled recurrences, of a few operations each, take longer than
    the operations take on a processor.
    """
    launches = sum(isinstance(call, FunctionCall) and not call.moves for call in program.calls)
    profile, device = request.profile, request.device
    units, peaks = profile.family.joined, profile.peaks
    each = peaks.launch_us if peaks is not None else units.launch_us if units is not None else 0.0
    if device is None or request.slower_too or prover.cut is not None or launches < _MANY_LAUNCHES:
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


def _compiled_parts(
    request: CompileRequest, cut: Cut, sizes: Sequence[ObservedSizes], stage: _Stages, *, slower_too: bool
) -> Iterator[sized.CompiledPart | SizesLeftOut]:
    """Yield partitions compiled for sizes, and the sizes for which one is wrong, or slower."""
    for n, observed in enumerate(sizes):
        sizes_shown = ", ".join(map(str, observed.sizes))
        stage("write", (n + 1) / (len(sizes) + 2), f"compile part {observed.part} for size {sizes_shown}")
        found = _compiled_part(request, cut, observed, slower_too=slower_too)
        if isinstance(found, str):
            yield SizesLeftOut(part=observed.part, sizes=observed.sizes, why=found)
        else:
            yield found


def _compiled_part(
    request: CompileRequest, cut: Cut, observed: ObservedSizes, *, slower_too: bool
) -> sized.CompiledPart | str:
    """Compile and verify a partition as a model of its own, and time it where there is a device.

    Returns a sentence that says why, where it cannot be compiled.
    """
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
            like=None,
            sizes=(),
        )
        try:
            compile_file(own, lambda stage, done, text: None)
            timed = None
            if request.device is not None:
                timed = sized.in_turns(
                    request.output, observed.part, output, request.device, slower_too=slower_too
                )
                if timed.why_not:
                    return timed.why_not
        except (ModelRefused, InvalidArgument, DeviceError) as refused:
            return f"it cannot be compiled: {'; '.join((str(refused), *getattr(refused, 'reasons', ())))}"[
                :_TOLD
            ]
        return _read_part(output, observed, timed)


def _read_part(
    output: Path, observed: ObservedSizes, timed: sized.FormTiming | None
) -> sized.CompiledPart | str:
    with modelfile.read(output, verify=False) as file:
        if file.model.split is not None:
            return "it cannot be compiled whole"
        indices = (i for i, b in enumerate(file.model.buffers) if b.place == "constant")
        constants = {i: np.array(file.constant(i)) for i in indices}
        return sized.CompiledPart(
            observed=observed,
            model=file.model,
            constants=constants,
            times=timed.times if timed is not None else None,
            least=timed.least if timed is not None else 0,
        )


def _prover(
    request: CompileRequest,
    prepared: Prepared,
    normalised: Normalised,
    choice: PrecisionChoice | None,
    like: CompiledModel | None,
) -> Prover:
    """Choose probes and evaluate the reference; raises ModelRefused where nothing can be verified by it.

    Inputs that the user gave are probes, also those that the model was compiled with before.
    """
    shapes = {i.name: i.shape for i in normalised.inputs}
    bound = bind_shapes(prepared.given, shapes)
    whole = bind_shapes(prepared.whole, shapes) if prepared.cut is not None else None
    given = (
        choose.calibration_sets(request.calibration, normalised.inputs)
        if request.calibration is not None
        else probed_before(request.like, normalised)
        if like is not None
        else ()
    )
    half, in_parts = choice is not None and choice.half, prepared.cut is not None and prepared.cut.between
    judged = request.device is not None and not half and not in_parts
    expected = expect(bound, normalised, given, whole, discontinuities.quantising(bound) if judged else None)
    if prepared.cut is not None and prepared.cut.behind and whole is not None:
        expected = with_behind(expected, prepared.cut, whole)
    with request.path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    prover = strict.copy_fields(
        Prover,
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
    return prover.with_quantised()


def check_file(request: CompileRequest, report: Report) -> None:
    """Check for nearly all that a model is refused for, far faster than compiling; raise what that raises."""
    stage = _Stages(report)
    _import(_prepare(request, stage).normalised, stage)


def fit_file(request: CompileRequest) -> Fitted:
    """Return what would run on which engine, without generating a kernel; flops are 0 where sizes are open.

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
        inputs=tuple(map(_described, model.graph.input)),
        outputs=tuple(map(_described, model.graph.output)),
        nbytes=model.ByteSize(),
        cpu_engine=has_cpu_engine(),
    )


def _described(value: onnx.ValueInfoProto) -> str:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return f"{value.name}: {(kind or 'nothing').removesuffix('_type')}"
    tensor = value.type.tensor_type
    sizes = (d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in tensor.shape.dim)
    return f"{value.name}: {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()} [{', '.join(sizes)}]"


class _Stages:
    """Turns progress within a stage into progress of the whole."""

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


def _prepare(
    request: CompileRequest, stage: _Stages, unbuilt: Mapping[str, str] = MappingProxyType({})
) -> Prepared:
    stage("check", 0.0, f"read {request.filename}")
    model = frontend.load(request.path)
    stage("normalise", 0.0, "normalise the graph and fold constants")
    return prepare(model, request.shapes, request.precision, request.profile, unbuilt)


def _import(normalised: Normalised, stage: _Stages) -> ImportedModule:
    stage("import", 0.0, "import into the compiler")
    return frontend.import_named(normalised)


def _lower(
    given: ImportedModule,
    request: CompileRequest,
    stage: _Stages,
    by_rules: Container[str] = (),
    admit: Callable[[Program], None] = lambda _program: None,
) -> LoweredModel:
    """Lower a model with recorded schedules, else with those that need no trial; some tasks `by_rules`."""
    profile, records = request.profile, request.records
    known = recorded(records, profile) if records else NOTHING
    joining, picked = joins(profile, known.times), partial(first_kernels, known={})
    import_for(profile.rules.family)

    def choose(task: str, func: tirx.PrimFunc) -> tuple[str, tirx.PrimFunc] | None:
        return None if task in by_rules else known.schedules(task, func)

    def first(
        func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile
    ) -> tuple[str, Lowered, list[str]]:
        kernels = default_kernels if by_rules and task_key(func) in by_rules else picked
        return kernels(func, name, target, profile)

    lowered = lower_module(
        given.module,
        profile,
        stage.of("lower"),
        choose,
        first,
        given.names,
        request.processes,
        joining,
        admit=admit,
    )
    return replace(lowered, notes=(*lowered.notes, *joining.notes()))


def _rebuilt(
    lowered: LoweredModel,
    given: ImportedModule,
    products: Container[str],
    request: CompileRequest,
    stage: _Stages,
) -> tuple[LoweredModel, Mapping[str, str] | None]:
    """Return the model with default rules for the functions that the driver does not build.

    Also says, by the values that they make, why it builds some with those neither; None where it builds all
    functions of the given model. Of a product or convolution and what is fused with it, the latter is named:
    the former, which takes the time, may build alone.
    """
    device = request.device
    assert device is not None  # nothing is built without one
    refused = _not_built(lowered, {one.task for one in lowered.functions.values()}, device)
    if not refused:
        return lowered, None
    plain = _lower(given, request, stage.rest(), refused)
    left = _not_built(plain, refused, device)
    name = device.profile.identity.name
    notes = tuple(
        f"{one.name} keeps its default schedule, {name} does not build a better one: {refused[one.task]}"
        for one in plain.functions.values()
        if one.task in refused and one.task not in left
    )
    unbuilt = {}
    for call in plain.program.calls:
        if isinstance(call, FunctionCall) and (one := plain.functions[call.function]).task in left:
            why = f"{name} does not build its kernel {one.name} ({left[one.task]})"
            lesser = [value for value in call.operators if value not in products]
            unbuilt.update({value: why for made in lesser or call.operators for value in made_from(made)})
    if left and not unbuilt:
        raise _unbuildable(left)
    return replace(plain, notes=(*plain.notes, *notes)), unbuilt


def _not_built(lowered: LoweredModel, tasks: Container[str], device: Device) -> Mapping[str, str]:
    """Return the driver's complaints about those of the tasks that it does not build."""
    found = {}
    for function in lowered.functions.values():
        if function.task in tasks:
            try:
                programs.build(device, function.source, None)
            except NotBuilt as refused:
                found[function.task] = shown(refused.complaint)
    return found


def _by_rules(
    lowered: LoweredModel, given: ImportedModule, request: CompileRequest, stage: _Stages
) -> LoweredModel | None:
    """Return the model lowered with default rules alone, or None where its kernels already are those."""
    plain = lower_module(
        given.module,
        request.profile,
        stage.of("prove", 0.5, 0.3),
        first=default_kernels,
        names=given.names,
        processes=request.processes,
    )
    found, before = ({name: f.source for name, f in one.functions.items()} for one in (plain, lowered))
    return None if found == before else plain
