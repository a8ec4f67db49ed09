"""Assembles lowered models, runs them on a device, and compares them with the reference."""

from __future__ import annotations

import hashlib
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.protocol import strict
from honed.protocol.errors import HonedError, ModelRefused
from honed.runtime.compiled import modelfile, parts
from honed.runtime.compiled.model import CompiledModel, PartitionTensor, SourceModel
from honed.runtime.engines import HIGHEST, LEVELS, LOWEST, PROVING_MIB, PartLimits
from honed.runtime.execution import verification
from honed.runtime.execution.cpuparts import CpuPartitionProcess
from honed.runtime.execution.executor import Executor
from honed.tuner import frontend
from honed.tuner.frontend import Normalised, Precision
from honed.tuner.lower.module import LoweredModel, UntunedKernels, lower_module
from honed.tuner.verify import discontinuities, evaluator, locate, probes
from honed.tuner.verify.probes import ReferenceProbes

from . import calls
from .assemble import assemble
from .fusion import FusionPolicy
from .partition import PartitionedModel
from .schedules import untuned_kernels


def open_executor(model: CompiledModel, constants: Mapping[int, np.ndarray], device: Device) -> Executor:
    """Return an executor over a temporary file, which is deleted when the executor is closed."""
    with tempfile.TemporaryDirectory(prefix="honed-") as folder:
        path = Path(folder) / "draft.honed"
        modelfile.write(path, model, constants)
        parts = partial(CpuPartitionProcess, PartLimits(memory_mib=PROVING_MIB))
        return Executor(modelfile.read(path, verify=False), device, part_process=parts)


def run_model(
    model: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
    device: Device,
    precision: Precision = "auto",
    first: UntunedKernels = untuned_kernels,
) -> dict[str, np.ndarray]:
    """Compile a model of static shapes with schedules that need no trial, and run it once.

    Computes in the model's own types where the precision is "auto".
    Raises as `compile_file`.
    """
    return next(run_sets(model, [inputs], device, precision, first))


def run_sets(
    model: onnx.ModelProto,
    inputs: Iterable[Mapping[str, np.ndarray]],
    device: Device,
    precision: Precision,
    first: UntunedKernels,
    processes: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Compile as `run_model` does, and run with several sets of inputs, each when its outputs are asked for.

    `processes` is as in `CompileRequest`.
    """
    profile = device.profile
    normalised = frontend.normalise(model, precision=precision, profile=profile)
    imported = frontend.import_named(normalised)
    lowered = lower_module(
        imported.module,
        profile,
        first=first,
        names=imported.names,
        processes=processes,
        joins=FusionPolicy(profile),
    )
    sha256 = hashlib.sha256(model.SerializeToString()).hexdigest()
    source = strict.copy_fields(
        SourceModel, normalised, "choice", sha256=sha256, filename="(in memory)", notes=()
    )
    compiled, constants = assemble(source, profile, normalised, lowered, None)
    with open_executor(compiled, constants, device) as executor:
        for each in inputs:
            yield executor.run(each)


Tell = Callable[[float, str], None]  # The share of the proof that is done, and the present step

_PROBES = 3
_BLAMING_S = 60.0  # Seconds after which no more variants are compiled to find the faulty node
# The file carries its probes; where they are larger than this, it carries one only.
_PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """A compiled form, the errors of its probes, and the result of verifying it by parts, if needed."""

    model: CompiledModel
    constants: Mapping[int, np.ndarray]
    results: tuple[verification.Difference, ...] = ()
    piecewise: discontinuities.PiecewiseVerification | None = None
    notes: tuple[str, ...] = ()  # Notes on NaN and infinities
    unproven: str = ""  # Reason why right answers do not verify the model
    programs: Sequence[object] = ()  # Programs that the device built, kept for other attempts

    @property
    def wrong(self) -> tuple[str, ...]:
        """The outputs that differ from the reference by more than allowed, one sentence each."""
        part = self.piecewise.wrong if self.piecewise is not None else None
        differing = tuple(str(result) for result in self.results if not result.right)
        return differing or ((part,) if part else ())

    @property
    def why_not(self) -> str:
        """The reason not to serve it; "" where it is verified."""
        return self.wrong[0] if self.wrong else self.unproven

    def with_device_errors(self, device: Device | None) -> CompiledModel:
        """Return the model with its largest errors on the device in its proof.

        Without a device the model was not compared, and is returned unchanged.
        """
        if device is None or self.model.proof is None:
            return self.model
        worst = tuple(
            max((r.error for r in self.results if r.output == output.name), default=0.0)
            for output in self.model.outputs
        )
        done = replace(self.model.proof, device=device.profile.identity.name, error=worst)
        source = replace(self.model.source, notes=(*self.model.source.notes, *self.notes))
        return replace(self.model, proof=done, source=source)

    def refusal(self, where: str) -> ModelRefused:
        """Return the refusal of a model with wrong answers; `where` says which node is wrong."""
        return ModelRefused(
            f"the compiled model does not give the reference's answers ({self.wrong[0]}); {where}",
            (*self.wrong, where),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """A verifier shared by all attempts at a model.

    `bound` is the model as the reference evaluates it, with static inputs. `device`, `precision` and
    `processes` are as in `CompileRequest`.
    """

    source: SourceModel  # Lacks the notes of lowering and proof
    profile: DeviceProfile
    device: Device | None
    normalised: Normalised
    cut: PartitionedModel | None
    expected: ReferenceProbes
    bound: onnx.ModelProto
    precision: Precision
    processes: int
    quantised: discontinuities.PiecewiseVerification | None = (
        None  # The normalised model's proof by the reference, where all steps quantise
    )

    @property
    def half(self) -> bool:
        """Return whether fp16 was chosen; the model's own types are the alternative."""
        return self.source.choice is not None and self.source.choice.half

    @property
    def in_parts(self) -> bool:
        """Return whether partitions run between compiled steps, so that a faulty node cannot be located."""
        return self.cut is not None and bool(self.cut.between)

    def with_quantised(self) -> Verifier:
        """Return this with the proof of the normalised model by the reference, where all steps quantise.

        Raises ModelRefused where no kernels could be verified, because the model amplifies rounding.
        """
        if self.expected.opened is None or self.expected.hidden:
            return self
        found = self._judge(self._evaluate_normalised)
        if found is not None and found.undetermined:
            raise unverifiable(found.undetermined)
        return replace(self, quantised=found)

    def verify(
        self, lowered: LoweredModel, first: UntunedKernels, tell: Tell, done: float, *more: str
    ) -> VerificationResult:
        """Return a compiled model, compared with the reference where there is a device.

        A model whose probes are wrong is verified part by part where it has steps; `more` are notes. ONNX
        Runtime optimises the partitions of the CPU engine to the highest level at which the model is right.
        Raises ModelRefused where the tail partition is wrong.
        """
        if self.cut is None:
            return self._attempt(lowered, first, tell, done, *more)
        cut = self.cut

        def at(level: str, *notes: str) -> VerificationResult | ModelRefused:
            """Return an attempt with partitions at this level, or the refusal of a wrong last partition."""
            prover = replace(self, cut=replace(cut, level=level))
            try:
                return prover._attempt(lowered, first, tell, done, *more, *notes)
            except ModelRefused as refused:
                return refused

        found = at(HIGHEST)
        if self._parts_may_err(found):
            why = str(found) if isinstance(found, ModelRefused) else str(found.wrong[0])
            lowest = at(LOWEST, _not_optimised(LOWEST, why))
            if not self._parts_may_err(lowest):  # The optimisations of the partitions are at fault
                others = (level for level in LEVELS if level not in (HIGHEST, LOWEST))
                tried = (at(level, _not_optimised(level, why)) for level in others)
                found = next((one for one in tried if not self._parts_may_err(one)), lowest)
        if isinstance(found, ModelRefused):
            raise found
        return found

    def _parts_may_err(self, attempt: VerificationResult | ModelRefused) -> bool:
        return isinstance(attempt, ModelRefused) or (self.in_parts and not self.half and bool(attempt.wrong))

    def _attempt(
        self, lowered: LoweredModel, first: UntunedKernels, tell: Tell, done: float, *more: str
    ) -> VerificationResult:
        draft = self._assemble(self.expected, lowered, more)
        if self.device is None:
            return draft
        name, hidden = self.device.profile.identity.name, bool(self.expected.hidden)
        tell(done, f"compare with {self.expected.evaluator} on {name}")
        tried = _probe(self.device, draft, self.expected)
        if not tried.wrong and not hidden:
            return tried
        unproven = self.expected.hidden if self.expected.needs_steps else ""
        if self.half or self.in_parts:
            return replace(tried, unproven="" if tried.wrong else unproven)
        tell(done + 0.05, f"compare part by part on {name}")
        apart, device = self.quantised, self.device
        # Parts are not compiled by themselves where all steps quantise and each call that is served is right:
        # the reference evaluates them, once they are normalised.
        if apart is None or apart.wrong is not None or not self._calls_are_right(lowered, device):
            apart = self._judge(
                lambda variant, given: run_sets(variant, given, device, self.precision, first, self.processes)
            )
        if apart is None or apart.wrong is not None:
            return replace(tried, piecewise=apart, unproven="" if apart or tried.wrong else unproven)
        if not tried.wrong:
            return replace(tried, piecewise=apart)
        allowed = replace(self.expected, tolerance=apart.tolerance, selections=apart.selections)
        made = self._assemble(allowed, lowered, (*more, apart.note))
        if apart.selections:  # Rows must be put in the reference's order
            return replace(_probe(self.device, made, allowed), piecewise=apart)
        every = zip(tried.results, itertools.cycle(apart.tolerance), strict=False)
        results = tuple(replace(result, tolerance=most) for result, most in every)
        return replace(made, results=results, piecewise=apart, notes=tried.notes)

    def refusal(self, tried: VerificationResult, first: UntunedKernels) -> ModelRefused:
        """Return the refusal of a model whose answers are wrong or that nothing verifies.

        It names the first node that differs.
        """
        assert self.device is not None  # Errors are only known from a device
        device, precision = self.device, self.precision
        if not tried.wrong:
            return unverifiable(tried.unproven)
        if self.in_parts:
            return tried.refusal("which node is wrong is not looked for in a model of several parts")
        apart = tried.piecewise
        if apart is not None and apart.blamed is None:
            return tried.refusal("each part is right, and its steps do not explain as much")
        worst = next((n for n, result in enumerate(tried.results) if not result.right), 0)
        blamed = self.bound, self.expected.inputs[worst // len(tried.model.outputs)]
        model, inputs = blamed if apart is None or apart.blamed is None else apart.blamed
        located = locate.first_difference(
            model,
            inputs,
            lambda variant, given: run_model(variant, given, device, precision, first),
            precision=tried.model.source.precision,
            seconds=_BLAMING_S,
        )
        return tried.refusal("; ".join(filter(None, (apart.wrong if apart else "", located))))

    def _assemble(
        self, expected: ReferenceProbes, lowered: LoweredModel, more: tuple[str, ...]
    ) -> VerificationResult:
        notes = (*self.source.notes, *lowered.notes, *expected.notes, *more)
        source = replace(self.source, notes=notes)
        return VerificationResult(
            *assemble(source, self.profile, self.normalised, lowered, expected, self.cut)
        )

    def _judge(self, run: discontinuities.Run) -> discontinuities.PiecewiseVerification | None:
        return discontinuities.judge(
            self.bound,
            self.expected.inputs,
            run,
            precision=self.source.precision,
            tolerance=self.expected.tolerance,
            opened_model=self.expected.opened,
        )

    def _calls_are_right(self, lowered: LoweredModel, device: Device) -> bool:
        """Return whether each call is right; False also where the device has no memory for the outputs."""

        def run(program: LoweredModel, shown: Normalised) -> list[dict[str, np.ndarray]]:
            with open_executor(
                *assemble(self.source, self.profile, shown, program, None), device
            ) as executor:
                return [executor.run(each) for each in self.expected.inputs]

        try:
            return calls.are_right(lowered, self.normalised, self.expected.inputs, run)
        except HonedError:
            return False

    def _evaluate_normalised(
        self, variant: onnx.ModelProto, sets: Iterable[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """Have the reference evaluate a normalised model; raise ModelRefused where it does not."""
        normalised = frontend.normalise(variant, precision=self.precision, profile=self.profile)
        return calls.evaluate_reference(normalised, list(sets))


def _not_optimised(level: str, why: str) -> str:
    return f"ONNX Runtime optimises the CPU engine's parts no further than level {level}, because then {why}"


def unverifiable(why: str) -> ModelRefused:
    """Return the refusal of a model whose answers may be right, but cannot be verified."""
    return ModelRefused(
        f"the compiled form cannot be verified, because {why}; give real inputs with --calibration, a folder "
        "with one .npz file for each set",
        (why,),
    )


def expect(
    bound: onnx.ModelProto,
    normalised: Normalised,
    examples: Sequence[Mapping[str, np.ndarray]] = (),
    whole: onnx.ModelProto | None = None,
    piecewise: discontinuities.PiecewiseModel | None = None,
) -> ReferenceProbes:
    """Choose probes and evaluate the reference; `probes.choose` describes `examples`, `whole`, `piecewise`.

    Raises ModelRefused where the reference cannot be evaluated, gives outputs of other types or shapes, or
    says too little of an output.
    """
    size = sum(math.prod(s.shape) * s.numpy.itemsize for s in (*normalised.inputs, *normalised.outputs))
    count = _PROBES if size * _PROBES <= _PROBE_BYTES else 1
    kept = normalised.preconditions
    examples = [each for each in examples if all(one.allows(each[one.input]) for one in kept)]
    choose = partial(
        probes.choose, bound, count, normalised.precision, examples=examples, whole=whole, preconditions=kept
    )
    found = choose(piecewise=piecewise)
    if isinstance(found, evaluator.ReferenceFailure) and piecewise is not None:
        found = choose()  # The values at the steps may be too large
    if isinstance(found, evaluator.ReferenceFailure):
        raise found.refusal()
    for spec in normalised.outputs:
        shown = found.outputs[0][spec.name]
        if shown.shape != spec.shape:
            raise ModelRefused(
                f"output {spec.name!r} has the shape {list(spec.shape)} by the model's operators and "
                f"{list(shown.shape)} in {found.evaluator}, so that it cannot be verified"
            )
    if found.unproven:
        raise unverifiable(found.unproven)
    return replace(found, special=probes.choose_special(bound, found.inputs[0]))


def read_probe_inputs(like: Path | None, normalised: Normalised) -> list[Mapping[str, np.ndarray]]:
    """Return the inputs of the probes of a compiled model, where they fit this model."""
    if like is None:
        return []
    wanted = [(spec.name, spec.dtype, spec.shape) for spec in normalised.inputs]
    with modelfile.read(like, verify=False) as file:
        if [(t.name, t.dtype, t.shape) for t in file.model.inputs] != wanted:
            return []
        return [
            {name: np.array(value) for name, value in file.inputs(probe).items()}
            for probe in file.model.probes
        ]


def with_behind(expected: ReferenceProbes, cut: PartitionedModel, bound: onnx.ModelProto) -> ReferenceProbes:
    """Add the outputs of the tail partitions for the probes, from the whole model with static inputs.

    Raises ModelRefused where the reference cannot evaluate it, or gives other shapes than the partitions
    have.
    """
    found = evaluator.evaluate(bound, expected.inputs)
    if isinstance(found, evaluator.ReferenceFailure):
        raise found.refusal()
    for spec in (spec for spec in cut.outputs if spec.name in cut.ends):
        for one in found.outputs:
            shape = one[spec.name].shape
            if not parts.takes(strict.copy_fields(PartitionTensor, spec), shape):
                raise ModelRefused(
                    f"output {spec.name!r} has the shape {list(shape)} in {found.evaluator}, where "
                    f"{list(spec.shape)} (-1: any size) was found before, so that it cannot be verified"
                )
    behind = tuple(tuple(np.asarray(one[name], order="C") for name in cut.ends) for one in found.outputs)
    return replace(expected, behind=behind)


def _probe(device: Device, draft: VerificationResult, expected: ReferenceProbes) -> VerificationResult:
    """Return a compiled form with the errors of its probes, and notes on NaN and infinities."""
    with open_executor(draft.model, draft.constants, device) as executor:
        probed = draft.model.proof.probes if draft.model.proof is not None else ()
        behind = [found for probe in probed for found in verification.check_behind(executor, probe)]
        if wrong := tuple(str(found) for found in behind if not found.right):
            raise ModelRefused(
                "the part that the CPU engine is to run last does not give the reference's answers on the "
                f"reference's own values ({wrong[0]})",
                wrong,
            )
        results = verification.check_probes(executor)
        names = [output.name for output in draft.model.outputs]
        special = expected.special
        notes: tuple[str, ...] = ()
        if special is not None and all(result.right for result in results):
            allowed = dict(zip(names, expected.tolerance, strict=False))
            notes = tuple(probes.differences(executor, special, allowed))
        return replace(draft, results=results, notes=notes, programs=executor.programs)
