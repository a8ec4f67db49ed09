"""What of a model would run where, found out without making a kernel."""

from __future__ import annotations

import onnx

from honed.jobs.events import Fitted, FittedPart
from honed.machine.bundle import has_cpu_engine
from honed.protocol import strict
from honed.protocol.errors import ModelRefused
from honed.tuner import frontend
from honed.tuner.frontend.survey import NodeSurvey, survey

from .compile import CompileRequest, Prepared, prepare
from .partition.divide import flops


def fit_file(request: CompileRequest) -> Fitted:
    """As compiling would decide. Raises ModelRefused or InvalidArgument for what is no model at all."""
    model = frontend.load(request.path)
    found = survey(model, request.shapes)
    parts: tuple[FittedPart, ...]
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    try:
        prepared = prepare(model, request.shapes, request.precision, request.profile)
    except ModelRefused as refused:
        reasons = refused.reasons or (str(refused),)
        parts = (FittedPart(engine="cpu", nodes=len(model.graph.node), flops=_flops(found)),)
    else:
        parts, notes = _parts(model, prepared, found), prepared.normalised.notes
    return Fitted(
        parts=parts,
        reasons=reasons,
        notes=notes,
        inputs=tuple(map(_described, _given(model))),
        outputs=tuple(map(_described, model.graph.output)),
        nbytes=model.ByteSize(),
        cpu_engine=has_cpu_engine(),
    )


def _parts(model: onnx.ModelProto, prepared: Prepared, found: NodeSurvey | None) -> tuple[FittedPart, ...]:
    made = prepared.cut
    if made is None:
        return (FittedPart(engine="gpu", nodes=len(model.graph.node), flops=_flops(found)),)
    compiled = FittedPart(engine="gpu", nodes=made.nodes, flops=made.flops)
    return compiled, *(strict.like(FittedPart, part, engine="cpu") for part in made.parts)


def _flops(found: NodeSurvey | None) -> int:
    """An estimate of all operations; 0 where sizes are open."""
    return 0 if found is None else sum(flops(each.node, found.met) for each in found.nodes)


def _given(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    fixed = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in fixed]


def _described(value: onnx.ValueInfoProto) -> str:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return f"{value.name}: {(kind or 'nothing').removesuffix('_type')}"
    tensor = value.type.tensor_type
    sizes = (d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in tensor.shape.dim)
    return f"{value.name}: {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()} [{', '.join(sizes)}]"
