"""What a compiled file says of its parts, and what they are proven on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx

from honed.runtime.compiled.model import CpuPart, PartTensor, Split
from honed.tuner.frontend.signature import TensorSpec
from honed.tuner.prove import reference
from honed.tuner.prove.probes import Expected

from . import Cut


def files(cut: Cut | None) -> list[np.ndarray]:
    """The ONNX files of the parts, as constants."""
    parts = cut.parts if cut is not None else ()
    return [np.frombuffer(part.model.SerializeToString(), np.uint8) for part in parts]


def split(cut: Cut | None, first: int) -> Split | None:
    """What the header says of the parts, whose files are the constant buffers from `first` on."""
    if cut is None:
        return None
    parts = tuple(
        CpuPart(
            onnx=first + n,
            inputs=_tensors(part.inputs),
            outputs=_tensors(part.outputs),
            nodes=part.nodes,
            flops=part.flops,
            why=part.why,
            sized=part.sized,
            by_rows=part.by_rows,
        )
        for n, part in enumerate(cut.parts)
    )
    return Split(
        parts=parts, behind=cut.behind, outputs=_tensors(cut.outputs), nodes=cut.nodes, flops=cut.flops
    )


def with_behind(expected: Expected, cut: Cut, bound: onnx.ModelProto) -> Expected:
    """Add what the whole model, with static inputs, gives for the probes through the parts behind.

    Raises ModelRefused where the reference cannot evaluate it.
    """
    if not cut.behind:
        return expected
    found = reference.evaluate(bound, expected.inputs)
    if isinstance(found, reference.ReferenceFailure):
        raise found.refusal()
    behind = tuple(tuple(np.ascontiguousarray(one[name]) for name in cut.ends) for one in found.outputs)
    return replace(expected, behind=behind)


def _tensors(specs: Sequence[TensorSpec]) -> tuple[PartTensor, ...]:
    return tuple(PartTensor(name=s.name, dtype=s.dtype, shape=s.shape) for s in specs)
