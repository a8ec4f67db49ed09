"""What those who evaluate an ONNX model as it was given ask of it: its inputs, nodes in order, constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from honed.protocol.errors import InvalidArgument
from honed.runtime.dtypes import DTYPES

_MAX_CONSTANT = 4096  # elements; larger initializers never describe shapes or ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedValue:
    """A value whose type and shape are known: NumPy's name of the type, and static sizes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def bind_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """A copy of `model` whose inputs have these static shapes.

    Shapes that the file states for anything else are dropped: they may name the dimensions bound here.
    """
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    for value in bound.graph.input:
        shape = shapes.get(value.name)
        if shape is None:
            continue
        del value.type.tensor_type.shape.dim[:]
        for extent in shape:
            value.type.tensor_type.shape.dim.add().dim_value = extent
    for value in bound.graph.output:
        value.type.tensor_type.ClearField("shape")
    del bound.graph.value_info[:]
    return bound


def inputs(model: onnx.ModelProto) -> tuple[TypedValue, ...]:
    """The inputs a caller must give, in order: those with an initializer are constants and left out.

    Raises InvalidArgument for an input that is no tensor, of a type honed does not carry, or whose shape
    is not static.
    """
    fixed = {t.name for t in model.graph.initializer}
    return tuple(_required(v, "input") for v in model.graph.input if v.name not in fixed)


def outputs(model: onnx.ModelProto) -> tuple[str, ...]:
    """The names of the outputs, in order."""
    return tuple(v.name for v in model.graph.output)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node in order, those of subgraphs (If, Loop, Scan) after the node that holds them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from nodes(subgraph)


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The small constants of the main graph (initializers and Constant nodes holding a tensor), by name."""
    found = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        held = [a.t for a in node.attribute if a.name == "value"] if node.op_type == "Constant" else []
        if held:
            found[node.output[0]] = held[0]
    return {
        name: numpy_helper.to_array(tensor)
        for name, tensor in found.items()
        if np.prod(tensor.dims, dtype=np.int64) <= _MAX_CONSTANT and not tensor.external_data
    }


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """An integer attribute, or its default."""
    return next((a.i for a in node.attribute if a.name == name), default)


def label(node: onnx.NodeProto) -> str:
    """What to call a node: its name, or where it has none, the first value it makes."""
    return node.name or next((o for o in node.output if o), "") or node.op_type


def numpy_name(element: int) -> str | None:
    """NumPy's name of an ONNX element type; None where honed does not carry it."""
    try:
        name = helper.tensor_dtype_to_np_dtype(element).name
    except KeyError:
        return None
    return name if carried(name) else None


def carried(name: str) -> bool:
    """Whether honed carries the element type NumPy calls `name`."""
    return any(d.name == name for d in DTYPES)


def _required(info: onnx.ValueInfoProto, what: str) -> TypedValue:
    value = of_info(info)
    if value is not None:
        return value
    if not info.type.HasField("tensor_type") or numpy_name(info.type.tensor_type.elem_type) is None:
        raise InvalidArgument(f"{what} {info.name!r} is not a tensor of a type honed carries; export it anew")
    raise InvalidArgument(f"{what} {info.name!r} has no static shape; give one with --shape {info.name}=...")


def of_info(info: onnx.ValueInfoProto) -> TypedValue | None:
    """The declared type and shape; None where they are not static or of a type honed does not carry."""
    tensor = info.type.tensor_type
    name = numpy_name(tensor.elem_type)
    if name is None or not tensor.HasField("shape"):
        return None
    dims = tensor.shape.dim
    if not all(d.HasField("dim_value") and d.dim_value >= 0 for d in dims):
        return None
    return TypedValue(name=info.name, dtype=name, shape=tuple(d.dim_value for d in dims))


def of_tensor(tensor: onnx.TensorProto) -> TypedValue | None:
    """The type and shape of a constant; None for a type honed does not carry."""
    name = numpy_name(tensor.data_type)
    return None if name is None else TypedValue(name=tensor.name, dtype=name, shape=tuple(tensor.dims))
