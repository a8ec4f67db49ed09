"""From a normalised model to Relax, operator by operator with the public builders.

TVM's own ONNX importer is not used: it takes dynamic shapes into account everywhere, gives some operators
other meanings than ONNX does, and reads out of bounds where a run-time index is out of range. The core set
that normalised models are written in is small enough to be imported directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from onnx import NodeProto, helper, numpy_helper
from tvm import relax

from honed.protocol.errors import ModelRefused

from .normalise import Normalised
from .relax_ops import CORE, Node


@dataclass(frozen=True, slots=True)
class ImportedModule:
    """A model as Relax; `names` are the values of the ONNX model that variables hold."""

    module: tvm.IRModule
    names: Mapping[relax.Var, str]


def import_relax(normalised: Normalised) -> tvm.IRModule:
    """The model as an IRModule; see `import_named`."""
    return import_named(normalised).module


def import_named(normalised: Normalised) -> ImportedModule:
    """The model as an IRModule with one function `main`.

    Parameters are the model's inputs in order (in the types of the arithmetic), the result is a tuple of
    its outputs in order. Raises ModelRefused naming the node Relax does not take.
    """
    graph = normalised.model.graph
    builder = relax.BlockBuilder()
    values: dict[str, Any] = {}
    for tensor in graph.initializer:
        values[tensor.name] = _constant(numpy_helper.to_array(tensor))
    params = []
    for index, info in enumerate(graph.input):
        kind = info.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        values[info.name] = relax.Var(f"input_{index}", relax.TensorType(shape, _dtype(kind.elem_type)))
        params.append(values[info.name])
    types = {i.name: i.type.tensor_type.elem_type for i in (*graph.output, *graph.value_info)}
    with builder.function("main", params):
        with builder.dataflow():
            for node in graph.node:
                _emit(builder, node, values, _dtype(types[node.output[0]]))
            result = builder.emit_output(relax.Tuple([values[o.name] for o in graph.output]))
        builder.emit_func_output(result)
    names = {values[node.output[0]]: str(node.output[0]) for node in graph.node}
    return ImportedModule(builder.get(), names)


def _constant(array: np.ndarray) -> Any:
    return relax.const(np.ascontiguousarray(array).reshape(array.shape), array.dtype.name)


def _dtype(element: int) -> str:
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(element)).name)


def _emit(builder: relax.BlockBuilder, node: NodeProto, values: dict[str, Any], result: str) -> None:
    wrapped = Node(
        result=result,
        inputs=tuple(values[name] if name else None for name in node.input),
        attrs={a.name: helper.get_attribute_value(a) for a in node.attribute},
    )
    try:
        values[node.output[0]] = builder.emit(CORE[node.op_type](wrapped), name_hint="v")
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())[-300:]
        reason = f"{node.op_type} (node {node.name}): the compiler does not take it: {text}"
        raise ModelRefused(f"the model cannot be compiled: {reason}", (reason,)) from error
