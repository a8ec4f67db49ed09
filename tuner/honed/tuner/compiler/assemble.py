"""Assembles the header of a compiled model from the results of the stages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import numpy as np

from honed.machine.profile import DeviceProfile
from honed.protocol import strict
from honed.protocol.errors import Internal, ModelFileError
from honed.runtime.compiled import validate
from honed.runtime.compiled.model import (
    CompiledModel,
    CpuPartition,
    FusedGroup,
    Operator,
    PartitionTable,
    PartitionTensor,
    Probe,
    Proof,
    SourceModel,
    Tensor,
    View,
)
from honed.tuner.frontend import Normalised, StaticTensorSpec
from honed.tuner.graph import passes_behind
from honed.tuner.lower.module import LoweredModel
from honed.tuner.verify.probes import ReferenceProbes

from .partition import PartitionedModel

_COMPILER = ("honed", "apache-tvm", "apache-tvm-ffi", "onnx")


def assemble(
    source: SourceModel,
    profile: DeviceProfile,
    normalised: Normalised,
    lowered: LoweredModel,
    expected: ReferenceProbes | None,
    cut: PartitionedModel | None = None,
) -> tuple[CompiledModel, Mapping[int, np.ndarray]]:
    """Return the compiled model and its constants by buffer; the partitions' files and the probes are last.

    Raises Internal where the model breaks a rule of the format, which is a fault of the compiler.
    """
    cut_out = cut.parts if cut is not None else ()
    parts = [np.frombuffer(part.model.SerializeToString(), np.uint8) for part in cut_out]
    probed = _arrays(expected, normalised)
    plan = lowered.plan(profile, [*parts, *probed])
    probes, known = len(plan.buffers) - len(probed), _operators(normalised)
    model = strict.copy_fields(
        CompiledModel,
        plan,
        "forms",
        source=source,
        compiler={name: version(name) for name in _COMPILER},
        device=replace(profile, peaks=None),
        inputs=_tensors(normalised.inputs, plan.input_buffers),
        outputs=_tensors(normalised.outputs, plan.output_buffers),
        parts=tuple(
            FusedGroup(operators=tuple(known[name] for name in c.operators), prepare=c.prepare, steps=c.steps)
            for c in plan.calls
            if c.operators
        ),
        views=tuple(View(operator=known[v.operator], shape=v.shape, buffer=v.buffer) for v in plan.views),
        proof=_proof(expected, normalised, probes) if expected is not None else None,
        split=_split(cut, probes - len(parts)),
        preconditions=normalised.preconditions,
        names_values=True,
    )
    try:
        validate.check(model)
    except ModelFileError as error:
        broken = str(error).removesuffix("; compile the model again")
        raise Internal(
            f"the compiler broke a rule of its own ({broken}), which is no fault of the model; report it "
            "with the ONNX file, the options and the output of 'hone doctor --json'"
        ) from error
    return model, plan.constants


def _operators(normalised: Normalised) -> dict[str, Operator]:
    """Return the operators of the model as it was compiled, by the values they make."""
    return {
        value: Operator(name=value, op=node.op_type, passes=passes_behind(normalised.applied, value))
        for node in normalised.model.graph.node
        for value in node.output
    }


def _split(cut: PartitionedModel | None, first: int) -> PartitionTable | None:
    """Return the header's entry on partitions; their files are the constant buffers from `first` on.

    Returns None where the model is not partitioned.
    """
    if cut is None:
        return None
    parts = tuple(
        strict.copy_fields(
            CpuPartition,
            part,
            onnx=first + n,
            level=cut.level,
            inputs=_part_tensors(part.inputs),
            outputs=_part_tensors(part.outputs),
        )
        for n, part in enumerate(cut.parts)
    )
    return strict.copy_fields(
        PartitionTable, cut, "left_out", parts=parts, outputs=_part_tensors(cut.outputs)
    )


def _part_tensors(specs: Sequence[StaticTensorSpec]) -> tuple[PartitionTensor, ...]:
    return tuple(strict.copy_fields(PartitionTensor, spec) for spec in specs)


def _tensors(specs: Sequence[StaticTensorSpec], buffers: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(strict.copy_fields(Tensor, s, buffer=b) for s, b in zip(specs, buffers, strict=True))


def _arrays(expected: ReferenceProbes | None, normalised: Normalised) -> list[np.ndarray]:
    """Return the probes' inputs and expected outputs, one after the other."""
    found: list[np.ndarray] = []
    if expected is not None:
        behind = expected.behind or ((),) * len(expected.inputs)
        for given, wanted, last in zip(expected.inputs, expected.outputs, behind, strict=True):
            found += [np.ascontiguousarray(given[i.name]).reshape(i.shape) for i in normalised.inputs]
            found += [np.ascontiguousarray(wanted[o.name]).reshape(o.shape) for o in normalised.outputs]
            found += last
    return found


def _proof(expected: ReferenceProbes, normalised: Normalised, first: int) -> Proof:
    """Return a proof that has not been run yet; buffer `first` holds the first input of the first probe."""
    numbers = itertools.count(first)

    def next_buffers(count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(numbers, count))

    probes = tuple(
        Probe(
            inputs=next_buffers(len(normalised.inputs)),
            outputs=next_buffers(len(normalised.outputs)),
            tolerance=expected.tolerance,
            behind=next_buffers(len(behind)),
        )
        for behind in expected.behind or ((),) * len(expected.inputs)
    )
    return Proof(
        reference=expected.evaluator,
        probes=probes,
        device=None,
        error=(),
        covered=expected.covered,
        selections=expected.selections,
    )
