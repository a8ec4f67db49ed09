"""Which operators do for n values stacked along axis 0 what they do for each of them."""

from __future__ import annotations

import enum

import onnx
from onnx import helper

from .graph import Graph, axis_of

_UNARY = frozenset(
    {"Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Cos", "Cosh"}
    | {"Erf", "Exp", "Floor", "Identity", "IsNaN", "Log", "Neg", "Not", "Relu", "Round", "Sigmoid", "Sin"}
    | {"Sinh", "Sqrt", "Tan", "Tanh"}
)
ELEMENTWISE = _UNARY | frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual"}
    | {"Greater", "GreaterOrEqual", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mod", "BitShift", "Where"}
)
REDUCTIONS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"})
# What a fusing compiler launches a kernel for, wherever it stands.
LAUNCHED = REDUCTIONS | frozenset(
    {"MatMul", "Conv", "MaxPool", "AveragePool", "Softmax", "LogSoftmax", "LayerNormalization"}
    | {"ArgMax", "ArgMin"}
)


class Role(enum.Enum):
    """What an operand is to twins."""

    STACKED = "stacked along axis 0, once for each twin"
    BROADCAST = "stacked where it differs, at the rank of the result"
    BATCHED = "likewise, but constants do not differ"
    SAME = "the same for all twins"


def roles(graph: Graph, node: onnx.NodeProto) -> tuple[Role, ...] | None:
    """The role of each operand; None where twins of the node cannot be one.

    Then its result has a leading axis of 1, and so has every operand that may be stacked (those of BROADCAST
    and BATCHED once they have the rank of the result).
    """
    shape = graph.shape(node.output[0])
    if not shape or shape[0] != 1 or "" in node.input:
        return None
    count = len(node.input)
    if node.op_type in ELEMENTWISE:
        return (Role.BROADCAST,) * count
    if node.op_type == "MatMul":
        return _product(graph, node)
    if node.op_type == "Concat":
        return (Role.STACKED,) * count if axis_of(node, len(shape)) else None
    first = graph.shape(node.input[0]) if node.input else ()  # a part of constants alone has none
    if first[:1] != (1,) or not _keeps_batch(graph, node):
        return None
    return (Role.STACKED, *(Role.SAME,) * (count - 1))


def _product(graph: Graph, node: onnx.NodeProto) -> tuple[Role, ...] | None:
    ranks = [len(graph.shape(name)) for name in node.input]
    if min(ranks) < 2:
        return None
    if max(ranks) == 2:
        return (Role.STACKED, Role.SAME)
    return (Role.BATCHED, Role.BATCHED)


def _keeps_batch(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether an operator treats the parts of its first operand along axis 0 each by itself."""
    op, rank = node.op_type, len(graph.shape(node.input[0]))
    if op in ("Conv", "MaxPool", "AveragePool", "Reshape"):
        return True
    if op in ("Softmax", "LogSoftmax", "LayerNormalization", "ArgMax", "ArgMin", "Gather"):
        return axis_of(node, rank) > 0
    if op in REDUCTIONS:
        return all(axis % rank for axis in graph.numbers(node.input[1]))
    if op == "Transpose":
        return int(helper.get_node_attr_value(node, "perm")[0]) == 0
    if op == "Expand":
        return rank == len(graph.shape(node.output[0]))
    if op == "Slice":
        return all(axis % rank for axis in graph.numbers(node.input[3]))
    if op == "Pad":
        pads = graph.numbers(node.input[1])
        return pads[0] == pads[rank] == 0
    return False
