"""Imports a normalised model to Relax, operator by operator with the public builders.

TVM's own ONNX importer is not used: it handles dynamic shapes everywhere, gives some operators other meanings
than ONNX does, and reads out of bounds where a run-time index is out of range. The core set (`CORE`) of
normalised models is small enough to be imported directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from onnx import NodeProto, helper, numpy_helper
from tvm import relax

from honed.protocol.errors import ModelRefused
from honed.runtime.compiled import model

from .normalise import Normalised
from .walk import PART_OP

op, nn = relax.op, relax.op.nn


@dataclass(frozen=True, slots=True)
class ImportedModule:
    """A model as Relax; `names` are the values of the ONNX model that variables hold."""

    module: tvm.IRModule
    names: Mapping[relax.Var, str]


def import_relax(normalised: Normalised) -> tvm.IRModule:
    """Import the model as an IRModule, without the names that `import_named` gives as well."""
    return import_named(normalised).module


def import_named(normalised: Normalised) -> ImportedModule:
    """Import the model as an IRModule with one function `main`.

    Parameters are the model's inputs in order (in the types of the arithmetic), the result is a tuple of
    its outputs in order. Raises ModelRefused with the name of the node that Relax does not support.
    """
    graph = normalised.model.graph
    builder = relax.BlockBuilder()
    values: dict[str, Any] = {}
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        values[tensor.name] = relax.const(np.ascontiguousarray(array).reshape(array.shape), array.dtype.name)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A core node: its inputs as Relax expressions (None where left out), and its attributes.

    `result` is NumPy's name of the element type it makes. That of a product may be wider than its operands'.
    """

    result: str
    inputs: tuple[Any, ...]
    attrs: dict[str, Any]

    def shape(self) -> list[int]:
        """Return the shape of the first input."""
        return [int(d) for d in self.inputs[0].ty.shape]

    def numbers(self, index: int) -> list[int]:
        """Return a constant input as a list of integers."""
        return [int(v) for v in self.inputs[index].value.numpy().reshape(-1)]

    def lists(self, *names: str) -> list[list[int]]:
        """Return the attributes that are lists of integers."""
        return [list(self.attrs[name]) for name in names]


Import = Callable[[Node], Any]
_CONV = {3: (nn.conv1d, "NCW", "OIW"), 4: (nn.conv2d, "NCHW", "OIHW"), 5: (nn.conv3d, "NCDHW", "OIDHW")}
_MAX_POOL = {3: nn.max_pool1d, 4: nn.max_pool2d, 5: nn.max_pool3d}
_AVG_POOL = {3: nn.avg_pool1d, 4: nn.avg_pool2d, 5: nn.avg_pool3d}
# Operators with inputs alone, passed in order.
_PLAIN: Mapping[str, Callable[..., Any]] = {
    "Abs": op.abs, "Acos": op.acos, "Acosh": op.acosh, "Asin": op.asin, "Asinh": op.asinh, "Atan": op.atan,
    "Atanh": op.atanh, "BitwiseNot": op.bitwise_not, "Ceil": op.ceil, "Cos": op.cos, "Cosh": op.cosh,
    "Erf": op.erf, "Exp": op.exp, "Floor": op.floor, "IsNaN": op.isnan, "Log": op.log, "Neg": op.negative,
    "Not": op.logical_not, "Relu": nn.relu, "Round": op.round, "Sigmoid": op.sigmoid, "Sin": op.sin,
    "Sinh": op.sinh, "Sqrt": op.sqrt, "Tan": op.tan, "Tanh": op.tanh,
    "Add": op.add, "Sub": op.subtract, "Mul": op.multiply, "Div": op.divide, "Pow": op.power,
    "Max": op.maximum, "Min": op.minimum, "And": op.logical_and, "Or": op.logical_or, "Xor": op.logical_xor,
    "Equal": op.equal, "Less": op.less, "LessOrEqual": op.less_equal, "Greater": op.greater,
    "GreaterOrEqual": op.greater_equal, "BitwiseAnd": op.bitwise_and, "BitwiseOr": op.bitwise_or,
    "BitwiseXor": op.bitwise_xor, "Where": op.where,
}  # fmt: skip
_SHIFTS = {b"LEFT": op.left_shift, b"RIGHT": op.right_shift}
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "ReduceSum": op.sum, "ReduceMean": op.mean, "ReduceMax": op.max, "ReduceMin": op.min,
    "ReduceProd": op.prod,
}  # fmt: skip


def _plain(function: Callable[..., Any]) -> Import:
    return lambda node: function(*node.inputs)


def _reduction(function: Callable[..., Any]) -> Import:
    return lambda node: function(node.inputs[0], node.numbers(1), bool(node.attrs.get("keepdims", 1)))


def _pad(node: Node) -> Any:
    pads, rank = node.numbers(1), len(node.shape())
    widths = [w for axis in range(rank) for w in (pads[axis], pads[axis + rank])]
    value = node.inputs[2].value.numpy().reshape(-1)[0].item()
    return nn.pad(node.inputs[0], widths, pad_value=value)


def _extreme(function: Callable[..., Any]) -> Import:
    return lambda node: function(node.inputs[0], node.attrs["axis"], bool(node.attrs["keepdims"]))


def _matmul(node: Node) -> Any:
    return op.matmul(*node.inputs, out_dtype=node.result)


def _conv(node: Node) -> Any:
    function, data_layout, kernel_layout = _CONV[len(node.shape())]
    strides, padding, dilation = node.lists("strides", "pads", "dilations")
    return function(
        node.inputs[0],
        node.inputs[1],
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=node.attrs["group"],
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=node.result,
    )


def _pool(functions: Mapping[int, Callable[..., Any]], **extra: Any) -> Import:
    window = ("kernel_shape", "strides", "pads", "dilations")
    return lambda node: functions[len(node.shape())](node.inputs[0], *node.lists(*window), **extra)


def _cpu_part(node: Node) -> Any:
    target = model.part_symbol(node.attrs["part"], node.attrs["output"])
    kind = relax.TensorType(list(node.attrs.get("shape", ())), node.result)
    return relax.call_dps_packed(target, relax.Tuple(list(node.inputs)), kind)


def _best_places(node: Node) -> Any:
    """Return the places of the best elements of rows, whose search is the body of a Scan."""
    body = node.attrs["body"]
    (search,) = body.node
    (count,) = numpy_helper.to_array(body.initializer[0])
    largest = bool(helper.get_node_attr_value(search, "largest"))
    return op.topk(node.inputs[0], int(count), ret_type="indices", largest=largest, dtype=node.result)


CORE: Mapping[str, Import] = {
    **{name: _plain(function) for name, function in _PLAIN.items()},
    **{name: _reduction(function) for name, function in _REDUCTIONS.items()},
    "ArgMax": _extreme(op.argmax),
    "ArgMin": _extreme(op.argmin),
    "AveragePool": _pool(_AVG_POOL, count_include_pad=True),
    "BitShift": lambda node: _SHIFTS[node.attrs["direction"]](*node.inputs),
    "BitCast": lambda node: op.memory.view(node.inputs[0], dtype=node.result),
    "Cast": lambda node: op.astype(node.inputs[0], _dtype(node.attrs["to"])),
    "Concat": lambda node: op.concat(list(node.inputs), axis=node.attrs["axis"]),
    "Conv": _conv,
    "ConvInteger": _conv,
    "Expand": lambda node: op.broadcast_to(
        node.inputs[0], np.broadcast_shapes(tuple(node.shape()), tuple(node.numbers(1)))
    ),
    # Mode "clip" keeps every index, however wrong, inside the buffer.
    "Gather": lambda node: op.take(*node.inputs, axis=node.attrs["axis"], mode="clip"),
    "Identity": lambda node: node.inputs[0],
    "LayerNormalization": lambda node: nn.layer_norm(
        *node.inputs, axes=list(range(node.attrs["axis"], len(node.shape()))), epsilon=node.attrs["epsilon"]
    ),
    "LogSoftmax": lambda node: nn.log_softmax(node.inputs[0], axis=node.attrs["axis"]),
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MaxPool": _pool(_MAX_POOL),
    "Mod": lambda node: (op.mod if node.attrs.get("fmod") else op.floor_mod)(*node.inputs),
    "Pad": _pad,
    PART_OP: _cpu_part,
    "Reshape": lambda node: op.reshape(node.inputs[0], node.numbers(1)),
    "Scan": _best_places,
    "Slice": lambda node: op.strided_slice(
        node.inputs[0], node.numbers(3), node.numbers(1), node.numbers(2), node.numbers(4)
    ),
    "Softmax": lambda node: nn.softmax(node.inputs[0], axis=node.attrs["axis"]),
    "Transpose": lambda node: op.permute_dims(node.inputs[0], list(node.attrs["perm"])),
}
