"""The core set of operators and what each is in Relax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper
from tvm import relax

from honed.tuner import partcall

from .partnodes import PART_OP

op, nn = relax.op, relax.op.nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A core node: its inputs as Relax expressions (None where left out), its attributes.

    `result` is NumPy's name of the element type it makes. That of a product may be wider than its operands'.
    """

    result: str
    inputs: tuple[Any, ...]
    attrs: dict[str, Any]

    def dtype(self, index: int = 0) -> str:
        """NumPy's name of an input's element type."""
        return str(self.inputs[index].ty.dtype.dtype)

    def shape(self, index: int = 0) -> list[int]:
        """An input's shape."""
        return [int(d) for d in self.inputs[index].ty.shape]

    def numbers(self, index: int) -> list[int]:
        """A constant input as a list of integers."""
        return [int(v) for v in self.inputs[index].value.numpy().reshape(-1)]


Import = Callable[[Node], Any]
CORE: dict[str, Import] = {}


def core(*names: str) -> Callable[[Import], Import]:
    """Register the Relax form of core operators."""

    def register(function: Import) -> Import:
        CORE.update(dict.fromkeys(names, function))
        return function

    return register


def _plain(function: Callable[..., Any], count: int) -> Import:
    return lambda node: function(*node.inputs[:count])


CORE.update(
    {
        name: _plain(function, 1)
        for name, function in {
            "Abs": op.abs,
            "Acos": op.acos,
            "Acosh": op.acosh,
            "Asin": op.asin,
            "Asinh": op.asinh,
            "Atan": op.atan,
            "Atanh": op.atanh,
            "BitwiseNot": op.bitwise_not,
            "Ceil": op.ceil,
            "Cos": op.cos,
            "Cosh": op.cosh,
            "Erf": op.erf,
            "Exp": op.exp,
            "Floor": op.floor,
            "IsNaN": op.isnan,
            "Log": op.log,
            "Neg": op.negative,
            "Not": op.logical_not,
            "Relu": nn.relu,
            "Round": op.round,
            "Sigmoid": op.sigmoid,
            "Sin": op.sin,
            "Sinh": op.sinh,
            "Sqrt": op.sqrt,
            "Tan": op.tan,
            "Tanh": op.tanh,
        }.items()
    }
)
CORE.update(
    {
        name: _plain(function, 2)
        for name, function in {
            "Add": op.add,
            "Sub": op.subtract,
            "Mul": op.multiply,
            "Div": op.divide,
            "Pow": op.power,
            "Max": op.maximum,
            "Min": op.minimum,
            "And": op.logical_and,
            "Or": op.logical_or,
            "Xor": op.logical_xor,
            "Equal": op.equal,
            "Less": op.less,
            "LessOrEqual": op.less_equal,
            "Greater": op.greater,
            "GreaterOrEqual": op.greater_equal,
            "BitwiseAnd": op.bitwise_and,
            "BitwiseOr": op.bitwise_or,
            "BitwiseXor": op.bitwise_xor,
        }.items()
    }
)


@core("MatMul", "MatMulInteger")
def _matmul(node: Node) -> Any:
    return op.matmul(*node.inputs, out_dtype=node.result)


@core("Identity")
def _identity(node: Node) -> Any:
    return node.inputs[0]


@core("Mod")
def _mod(node: Node) -> Any:
    return (op.mod if node.attrs.get("fmod") else op.floor_mod)(*node.inputs)


@core("BitShift")
def _shift(node: Node) -> Any:
    left = node.attrs["direction"] == b"LEFT"
    return (op.left_shift if left else op.right_shift)(*node.inputs)


@core("Where")
def _where(node: Node) -> Any:
    return op.where(*node.inputs)


@core("Cast")
def _cast(node: Node) -> Any:
    to = np.dtype(helper.tensor_dtype_to_np_dtype(node.attrs["to"])).name
    return op.astype(node.inputs[0], to)


@core("Reshape")
def _reshape(node: Node) -> Any:
    return op.reshape(node.inputs[0], node.numbers(1))


@core("Transpose")
def _transpose(node: Node) -> Any:
    return op.permute_dims(node.inputs[0], list(node.attrs["perm"]))


@core("Expand")
def _expand(node: Node) -> Any:
    return op.broadcast_to(node.inputs[0], np.broadcast_shapes(tuple(node.shape()), tuple(node.numbers(1))))


@core("Concat")
def _concat(node: Node) -> Any:
    return op.concat(list(node.inputs), axis=node.attrs["axis"])


@core("Slice")
def _slice(node: Node) -> Any:
    starts, ends, axes, steps = (node.numbers(i) for i in range(1, 5))
    return op.strided_slice(node.inputs[0], axes, starts, ends, steps)


@core("Pad")
def _pad(node: Node) -> Any:
    pads, rank = node.numbers(1), len(node.shape())
    widths = [w for axis in range(rank) for w in (pads[axis], pads[axis + rank])]
    value = node.inputs[2].value.numpy().reshape(-1)[0].item()
    return nn.pad(node.inputs[0], widths, pad_value=value)


@core("Gather")
def _gather(node: Node) -> Any:
    # "clip" keeps every index, however wrong, inside the buffer.
    return op.take(node.inputs[0], node.inputs[1], axis=node.attrs["axis"], mode="clip")


def _reduction(function: Callable[..., Any]) -> Import:
    return lambda node: function(node.inputs[0], node.numbers(1), bool(node.attrs.get("keepdims", 1)))


for _name, _function in {
    "ReduceSum": op.sum,
    "ReduceMean": op.mean,
    "ReduceMax": op.max,
    "ReduceMin": op.min,
    "ReduceProd": op.prod,
}.items():
    CORE[_name] = _reduction(_function)


@core("ArgMax")
def _argmax(node: Node) -> Any:
    return op.argmax(node.inputs[0], node.attrs["axis"], bool(node.attrs["keepdims"]))


@core("ArgMin")
def _argmin(node: Node) -> Any:
    return op.argmin(node.inputs[0], node.attrs["axis"], bool(node.attrs["keepdims"]))


@core("Softmax")
def _softmax(node: Node) -> Any:
    return nn.softmax(node.inputs[0], axis=node.attrs["axis"])


@core("LogSoftmax")
def _log_softmax(node: Node) -> Any:
    return nn.log_softmax(node.inputs[0], axis=node.attrs["axis"])


@core("LayerNormalization")
def _layer_norm(node: Node) -> Any:
    axes = list(range(node.attrs["axis"], len(node.shape())))
    return nn.layer_norm(*node.inputs, axes=axes, epsilon=node.attrs["epsilon"])


_CONV = {3: (nn.conv1d, "NCW", "OIW"), 4: (nn.conv2d, "NCHW", "OIHW"), 5: (nn.conv3d, "NCDHW", "OIDHW")}


@core("Conv", "ConvInteger")
def _conv(node: Node) -> Any:
    function, data_layout, kernel_layout = _CONV[len(node.shape())]
    return function(
        node.inputs[0],
        node.inputs[1],
        strides=list(node.attrs["strides"]),
        padding=list(node.attrs["pads"]),
        dilation=list(node.attrs["dilations"]),
        groups=node.attrs["group"],
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=node.result,
    )


def _pool(functions: dict[int, Callable[..., Any]], **extra: Any) -> Import:
    def build(node: Node) -> Any:
        return functions[len(node.shape())](
            node.inputs[0],
            list(node.attrs["kernel_shape"]),
            list(node.attrs["strides"]),
            list(node.attrs["pads"]),
            list(node.attrs["dilations"]),
            **extra,
        )

    return build


@core(PART_OP)
def _cpu_part(node: Node) -> Any:
    target = partcall.symbol(node.attrs["part"], node.attrs["output"])
    kind = relax.TensorType(list(node.attrs.get("shape", ())), node.result)
    return relax.call_dps_packed(target, relax.Tuple(list(node.inputs)), kind)


CORE["MaxPool"] = _pool({3: nn.max_pool1d, 4: nn.max_pool2d, 5: nn.max_pool3d})
CORE["AveragePool"] = _pool({3: nn.avg_pool1d, 4: nn.avg_pool2d, 5: nn.avg_pool3d}, count_include_pad=True)
