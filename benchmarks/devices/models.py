"""Whole models compiled for a Mali with a precision, with probes, for any device that computes halves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from honed.tuner.compiler.compile import CompileRequest, compile_file
from honed.tuner.frontend import Precision

from .kernels import mali


@dataclass(frozen=True, slots=True)
class Made:
    """A compiled model: its arithmetic, the reason of `--precision auto` for it, and the allowed error."""

    name: str
    arithmetic: str
    why: str
    tolerance: float


def write(output: Path, model: Path, precision: Precision) -> Made:
    """Compile an ONNX file as it is first served."""
    request = CompileRequest(
        path=model,
        output=output,
        profile=mali(),
        device=None,
        shapes={},
        precision=precision,
        filename=model.name,
    )
    found = compile_file(request, lambda _stage, _done, _text: None).model
    assert found.proof is not None  # compile_file refuses what cannot be proven
    choice = found.source.choice
    return Made(
        name=model.stem,
        arithmetic=found.source.precision,
        why=choice.why if choice else f"{precision} was asked for",
        tolerance=max(limit for probe in found.proof.probes for limit in probe.tolerance),
    )
