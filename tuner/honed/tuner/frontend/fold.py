"""Constant folding: one node with constant inputs, evaluated by ONNX's reference evaluator.

TVM's own folding compiles every folded operator, which takes many times longer than compiling the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from .values import Array, NodeRefused, elem_type

# Operators whose reference implementation is a loop in Python, or which are meant to run on the device.
_SLOW = frozenset(
    {
        "Conv",
        "ConvTranspose",
        "ConvInteger",
        "QLinearConv",
        "DeformConv",
        "LSTM",
        "GRU",
        "RNN",
        "Scan",
        "Loop",
    }
    | {"AveragePool", "MaxPool", "LpPool", "Resize", "Upsample", "GridSample", "RoiAlign", "DFT", "STFT"}
)
_SLOW_ELEMENTS = 1 << 14  # a loop in Python over this many elements still ends within a second
_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
_SWELLING_BYTES = 1 << 20  # smaller constants may be many times larger than what they are made of
_SWELLING_TIMES = 8
_MATMUL_LIMIT = 1 << 32  # multiply-adds worth doing on the host


def worth_folding(op: str, arrays: Sequence[Array | None], limit_bytes: int) -> bool:
    """Whether evaluating `op` on the host is deterministic and bounded in time and memory."""
    present = [a for a in arrays if a is not None]
    if op in _RANDOM or sum(a.nbytes for a in present) > limit_bytes:
        return False
    if op in _SLOW:
        return sum(a.size for a in present) <= _SLOW_ELEMENTS
    if op in {"MatMul", "Gemm", "Einsum"} and len(present) >= 2:
        return present[0].size * present[1].shape[-1] <= _MATMUL_LIMIT if present[1].ndim else True
    return True


def swells(made_bytes: int, used_bytes: int) -> bool:
    """Whether a constant is so much larger than its parts that computing it at run time is cheaper."""
    return made_bytes > _SWELLING_BYTES and made_bytes > _SWELLING_TIMES * used_bytes


def evaluate(node: onnx.NodeProto, opset: int, inputs: dict[str, Array]) -> list[Any]:
    """The node's outputs (arrays, or lists of arrays for sequences), in order.

    Raises NodeRefused where the reference evaluator cannot evaluate it.
    """
    arrays = list(inputs.values())
    if node.op_type == "Div" and len(arrays) == 2 and arrays[0].dtype.kind in "iu":
        return [_truncated(inputs[node.input[0]], inputs[node.input[1]])]
    value_infos = [
        helper.make_tensor_value_info(name, elem_type(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    present = [name for name in node.output if name]
    graph = helper.make_graph([node], "node", value_infos, [onnx.ValueInfoProto(name=n) for n in present])
    domains = {"": opset, node.domain: opset if node.domain in ("", "ai.onnx") else 1}
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()])
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = ReferenceEvaluator(model).run(None, inputs)
    except Exception as error:  # the evaluator raises whatever NumPy raised
        raise NodeRefused(
            f"its constant value cannot be computed: {type(error).__name__}: {error}"
        ) from error
    by_name = dict(zip(present, results, strict=True))
    return [by_name.get(name) for name in node.output]


def _truncated(x: Array, y: Array) -> Array:
    """Integer division towards zero, as ONNX defines it; its evaluator rounds down."""
    if not y.all():
        raise NodeRefused("it divides integers by a constant 0")
    quotient = np.floor_divide(x, y)
    inexact = quotient * y != x
    return np.where(inexact & ((x < 0) != (y < 0)), quotient + 1, quotient).astype(x.dtype)
