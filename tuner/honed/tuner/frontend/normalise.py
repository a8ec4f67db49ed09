"""Normalises any ONNX model to static shapes, few operators, one opset, and types that a device has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from honed.machine.profile import DeviceProfile
from honed.onnxfile.contrib_schemas import NEWEST_OPSET
from honed.protocol.errors import InvalidArgument
from honed.runtime.compiled.model import Precondition
from honed.tuner.graph import PASSES, Applied, Pass, improve
from honed.tuner.graph.fp16_casts import BIT_CAST, Exemptions, put_casts, saturate, usually

from .builder import TARGET_OPSET, Builder
from .signature import StaticTensorSpec, dtype_of
from .values import Item, NodeRefused, Reasons, Unknown, Value
from .walk import Parts, Walker

Precision = Literal["auto", "fp32", "fp16"]
_HALF, _SINGLE, _DOUBLE = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE
_NUMPY: dict[int, type[np.floating[Any]]] = {_HALF: np.float16, _SINGLE: np.float32, _DOUBLE: np.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalised:
    """A model ready for import.

    `model` is ONNX at TARGET_OPSET: static shapes, topological order, no subgraphs, functions, sequences
    or unused nodes; every tensor typed (inputs, outputs, value_info). Its inputs and outputs have the
    user's names and order (an output that is called as an input has another name there), and the element
    types of the arithmetic; `inputs` and `outputs` give the names and types the user sees. `precision` is
    that of the arithmetic: "fp32" (some of it perhaps in fp64), "fp64", "fp16", or "mixed" (some of it in
    fp16). Products of fp16 may give float32 (`Exemptions.wide`), which is
    not of ONNX. It serves requests that keep `preconditions`.
    """

    model: onnx.ModelProto
    inputs: tuple[StaticTensorSpec, ...]
    outputs: tuple[StaticTensorSpec, ...]
    notes: tuple[str, ...]
    precision: str
    opset: int  # Opset of the original model
    producer: str
    applied: tuple[Applied, ...]  # Passes over the graph
    preconditions: tuple[Precondition, ...] = ()


def normalise(
    model: onnx.ModelProto,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    precision: Precision = "auto",
    profile: DeviceProfile | None = None,
    passes: Sequence[Pass] = PASSES,
    parts: Parts | None = None,
) -> Normalised:
    """Normalise a checked model for a device, by default one of all arithmetic, and improve its graph.

    The CPU engine runs `parts` of it (`honed.tuner.compiler.partition`), which nodes of PART_DOMAIN
    represent. Raises ModelRefused with every reason found, InvalidArgument where the model or the device
    cannot satisfy `shapes` or `precision`.
    """
    found = Reasons()
    walker = Walker(model, shapes or {}, found, parts)
    items = walker.walk()
    outputs = _output_specs(model, items, found)
    found.check()
    values = [item for item in items if isinstance(item, Value)]
    graph = _assemble(walker.builder, walker.inputs, outputs, values, model.graph.name or "model")
    graph, applied = improve(graph, passes)
    notes = _convert(graph, precision, profile)
    return Normalised(
        model=_model(graph),
        inputs=walker.inputs,
        outputs=tuple(outputs),
        notes=walker.notes + notes,
        precision=_label(graph),
        opset=walker.opsets.get("", 1),
        producer=" ".join(f"{model.producer_name} {model.producer_version}".split()),
        applied=applied,
        preconditions=tuple(walker.builder.preconditions),
    )


def in_half(normalised: Normalised, keep: Exemptions) -> Normalised:
    """Return a model whose floats are all float32 converted to fp16, except for `keep`."""
    model = deepcopy(normalised.model)
    _retype(model.graph, {_SINGLE: _HALF}, put_casts(model.graph, keep))
    return replace(normalised, model=model, precision=_label(model.graph))


def all_single(graph: onnx.GraphProto) -> bool:
    """Return whether a graph has floats and all are of float32."""
    return _float_types(graph) == {_SINGLE}


def _output_specs(model: onnx.ModelProto, items: list[Item], reasons: Reasons) -> list[StaticTensorSpec]:
    """Return the types of the outputs; computed types take precedence over those that the file declares."""
    specs: list[StaticTensorSpec] = []
    for info, item in zip(model.graph.output, items, strict=True):
        try:
            if info.type.WhichOneof("value") or not isinstance(item, Value):
                dtype_of(info)
        except NodeRefused as refusal:
            reasons.general.append(f"output {info.name!r}: {refusal}")
            continue
        if isinstance(item, Value):
            specs.append(StaticTensorSpec(name=info.name, dtype=item.dtype.name, shape=item.shape))
        elif not isinstance(item, Unknown):
            reasons.general.append(f"output {info.name!r}: it is a sequence or an optional, not a tensor")
        elif not reasons.texts():
            reasons.general.append(f"output {info.name!r}: no node computes it")
    if not model.graph.output:
        reasons.general.append("the model has no outputs")
    return specs


def _assemble(
    builder: Builder,
    inputs: tuple[StaticTensorSpec, ...],
    outputs: list[StaticTensorSpec],
    values: list[Value],
    name: str,
) -> onnx.GraphProto:
    """Return the graph of the nodes that outputs need, with each output under the user's name."""
    needed = {v.name for v in values}
    kept: list[onnx.NodeProto] = []
    for node in reversed(builder.nodes):
        if any(o in needed for o in node.output):
            kept.append(node)
            needed.update(node.input)
    kept.reverse()
    # Keeps the order, so that files are equal
    produced = dict.fromkeys(o for node in kept for o in node.output)
    given = {spec.name for spec in inputs}
    names = [builder.unique(o.name) if o.name in given else o.name for o in outputs]
    renamed = _name_outputs(kept, produced, names, values)
    shown = {*given, *names}
    constants = [
        v for n, v in builder.values.items() if n in needed and v.data is not None and n not in shown
    ]
    graph = helper.make_graph(
        kept,
        name,
        [_info(i.name, i) for i in inputs],
        [_info(n, o) for n, o in zip(names, outputs, strict=True)],
        value_info=[_info(n, builder.values[n]) for n in produced if n not in renamed],
    )
    graph.initializer.extend(numpy_helper.from_array(v.data, v.name) for v in constants if v.data is not None)
    return graph


def _name_outputs(
    nodes: list[onnx.NodeProto], produced: Collection[str], names: list[str], values: list[Value]
) -> dict[str, str]:
    """Let nodes make the outputs under the user's names; return these by the earlier names."""
    renamed: dict[str, str] = {}
    for name, value in zip(names, values, strict=True):
        if value.name in produced and value.name not in renamed:
            renamed[value.name] = name
        else:
            source = renamed.get(value.name, value.name)
            nodes.append(helper.make_node("Identity", [source], [name], name=f"{name}/Identity"))
    for node in nodes:
        node.input[:] = [renamed.get(old, old) for old in node.input]
        node.output[:] = [renamed.get(old, old) for old in node.output]
    return renamed


def _info(name: str, typed: Value | StaticTensorSpec) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name, type=typed.type_proto())


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    newest = any(node.op_type == BIT_CAST for node in graph.node)
    opset = helper.make_opsetid("", NEWEST_OPSET if newest else TARGET_OPSET)
    model = helper.make_model(graph, opset_imports=[opset], producer_name="honed")
    model.ir_version = 10  # The IR version of TARGET_OPSET
    return model


def _convert(graph: onnx.GraphProto, precision: Precision, profile: DeviceProfile | None) -> tuple[str, ...]:
    """Convert a graph (in place) to the requested precision, as far as the device has it; return notes.

    Raises InvalidArgument for fp16 on a device without it.
    """
    if precision not in ("auto", "fp32", "fp16"):
        raise InvalidArgument(f"precision {precision!r} does not exist; use auto, fp32 or fp16")
    fp16, fp64 = (profile.limits.fp16, profile.limits.fp64) if profile is not None else (True, True)
    if precision == "fp16" and not fp16:
        raise InvalidArgument("the device has no fp16 arithmetic (cl_khr_fp16); use --precision auto or fp32")
    present, notes = _float_types(graph), []
    types: dict[int, int] = {}  # New element types by old ones
    if precision == "fp32":
        types = {t: _SINGLE for t in present if t != _SINGLE}
    elif precision == "fp16":
        types = {t: _HALF for t in present if t != _HALF}
    else:
        for missing, bits, name in ((not fp16, 16, "cl_khr_fp16"), (not fp64, 64, "cl_khr_fp64")):
            kind = _HALF if bits == 16 else _DOUBLE
            if missing and kind in present:
                types[kind] = _SINGLE
                notes.append(
                    f"the model's float{bits} arithmetic is computed in float32: the device has no {name}"
                )
    kept = put_casts(graph, usually(graph)) if types.get(_SINGLE) == _HALF else frozenset()
    if types:
        _retype(graph, types, kept)
    return tuple(notes)


def _label(graph: onnx.GraphProto) -> str:
    """Return the precision of the arithmetic: "mixed" where some of it is in fp16, else the coarser."""
    present = _float_types(graph)
    if _HALF in present:
        return "fp16" if present == {_HALF} else "mixed"
    return "fp64" if present == {_DOUBLE} else "fp32"


def _float_types(graph: onnx.GraphProto) -> set[int]:
    found = {i.type.tensor_type.elem_type for i in (*graph.input, *graph.output, *graph.value_info)}
    return found & set(_NUMPY)


def _retype(graph: onnx.GraphProto, types: dict[int, int], kept: frozenset[str]) -> None:
    """Change element types, except those of the values named in `kept`."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.name not in kept:
            tensor_type = info.type.tensor_type
            tensor_type.elem_type = types.get(tensor_type.elem_type, tensor_type.elem_type)
    for index, tensor in enumerate(graph.initializer):
        if tensor.data_type in types and tensor.name not in kept:
            array = saturate(numpy_helper.to_array(tensor), _NUMPY[types[tensor.data_type]])
            graph.initializer[index].CopyFrom(numpy_helper.from_array(array, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and node.output[0] not in kept:
                attribute.i = types.get(attribute.i, attribute.i)
