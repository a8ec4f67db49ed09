"""Estimates of what a node computes, in operations: enough to tell where the work of a model is."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from honed.tuner.frontend.signature import TensorSpec

OPEN = 100  # what a size that depends on data is taken for


def flops(node: onnx.NodeProto, types: Mapping[str, TensorSpec]) -> int:
    """Of one run: what products multiply and add, the steps of recurrences, the elements of others."""
    shapes = [_sizes(types.get(name)) for name in node.input]
    made = elements(node, types)
    op = node.op_type
    if op in ("Conv", "ConvInteger", "QLinearConv", "ConvTranspose"):
        weights = shapes[3] if op == "QLinearConv" else shapes[1]
        over = math.prod(shapes[0]) if op == "ConvTranspose" else made
        return 2 * over * math.prod(weights[1:])
    if op in ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"):
        rows = shapes[0]
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        return 2 * made * (rows[0] if transposed else rows[-1]) if rows else made
    if op in ("LSTM", "GRU", "RNN") and len(shapes) > 2 and len(shapes[0]) == 3:
        steps, batch = shapes[0][:2]
        return 2 * steps * batch * (math.prod(shapes[1]) + math.prod(shapes[2]))
    return made


def elements(node: onnx.NodeProto, types: Mapping[str, TensorSpec]) -> int:
    """Of all that it makes."""
    return sum(math.prod(_sizes(types.get(name))) for name in node.output if name)


def _sizes(spec: TensorSpec | None) -> tuple[int, ...]:
    return tuple(size if size >= 0 else OPEN for size in spec.shape) if spec is not None else (1,)
