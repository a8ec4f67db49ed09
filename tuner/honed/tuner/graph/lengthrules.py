"""What operators make of operands of which axes are rounded up, one rule for each kind of operator.

An axis that is rounded up has elements beyond its last. They repeat the last one, so that they are as finite
as it is and whatever is done element by element does the same to them, or they are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import onnx
from onnx import helper

from .graph import Graph, Shape
from .stacking import ELEMENTWISE, REDUCTIONS


class Beyond(Enum):
    """What the elements of a rounded axis are beyond its last."""

    LAST = "the last again"
    ZERO = "zeros"


Axes = Mapping[int, Beyond]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How a node is computed: the axes of each operand that are rounded up, and what becomes of them."""

    operands: tuple[frozenset[int], ...]
    result: Axes
    masked: int | None = None  # an axis of the first operand: nothing beyond its last may count

    @property
    def applies(self) -> bool:
        """Whether any operand is rounded up."""
        return any(self.operands)


Rule = Callable[[Graph, onnx.NodeProto, tuple[Axes, ...]], "Rounding | None"]
_NONE: frozenset[int] = frozenset()


def rounding(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    """How a node takes operands of which the axes `given` are rounded up; None: only as they were.

    Axes of an operand that the answer leaves out are to be cut off.
    """
    rule = _RULES.get(node.op_type)
    found = rule(graph, node, given) if rule is not None and any(given) else None
    return found if found is not None and found.applies else None


def _elementwise(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    rank = len(graph.shape(node.output[0]))
    shifts = [rank - len(graph.shape(name)) for name in node.input]
    if any(kind is Beyond.ZERO for axes in given for kind in axes.values()):
        return None
    wanted = {axis + shift for axes, shift in zip(given, shifts, strict=True) for axis in axes}
    operands = tuple(
        frozenset(a - shift for a in wanted if a >= shift and graph.shape(name)[a - shift] > 1)
        for name, shift in zip(node.input, shifts, strict=True)
    )
    return Rounding(operands=operands, result=dict.fromkeys(wanted, Beyond.LAST))


def _product(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    ranks = [len(graph.shape(name)) for name in node.input]
    if min(ranks) < 2:
        return None
    rank = max(ranks)
    summed = [given[0].get(ranks[0] - 1), given[1].get(ranks[1] - 2)]
    kept = Beyond.ZERO in summed
    operands, result = [], set[int]()
    for n, (axes, own) in enumerate(zip(given, ranks, strict=True)):
        terms = own - 1 - n
        mine = {axis for axis, kind in axes.items() if axis != terms and kind is Beyond.LAST}
        result |= {axis + rank - own for axis in mine}
        operands.append(frozenset(mine | ({terms} if kept else set())))
    for n, own in enumerate(ranks):  # batches are those of both
        shape = graph.shape(node.input[n])
        batches = (axis - rank + own for axis in result if axis < rank - 2)
        operands[n] |= {axis for axis in batches if axis >= 0 and shape[axis] > 1}
    return Rounding(operands=tuple(operands), result=dict.fromkeys(result, Beyond.LAST))


def _softmax(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    axis = _axis(node, len(graph.shape(node.input[0])))
    last = {n: kind for n, kind in given[0].items() if kind is Beyond.LAST}
    if axis not in last:
        return Rounding(operands=(frozenset(last),), result=last)
    return Rounding(operands=(frozenset(last),), result={**last, axis: Beyond.ZERO}, masked=axis)


def _log_softmax(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    axis = _axis(node, len(graph.shape(node.input[0])))
    return _beside(given, {axis})


def _layer_norm(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    rank = len(graph.shape(node.input[0]))
    return _beside(given, set(range(_axis(node, rank), rank)))


def _slice(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    rank = len(graph.shape(node.input[0]))
    return _beside(given, {axis % rank for axis in graph.numbers(node.input[3])})


def _reduction(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    rank = len(graph.shape(node.input[0]))
    summed = {axis % rank for axis in graph.numbers(node.input[1])}
    if len(graph.shape(node.output[0])) == rank:
        return _beside(given, summed)
    kept = [axis for axis in range(rank) if axis not in summed]
    found = _beside(given, summed)
    return Rounding(
        operands=found.operands, result={kept.index(axis): kind for axis, kind in found.result.items()}
    )


def _beside(given: tuple[Axes, ...], taken: set[int]) -> Rounding:
    """Of an operator that treats each place along all axes but those `taken` of its first operand alike."""
    kept = {axis: kind for axis, kind in given[0].items() if axis not in taken and kind is Beyond.LAST}
    return Rounding(operands=(frozenset(kept), *(_NONE,) * (len(given) - 1)), result=kept)


def _transpose(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    order = list(helper.get_node_attr_value(node, "perm"))
    moved = {order.index(axis): kind for axis, kind in given[0].items()}
    return Rounding(operands=(frozenset(given[0]),), result=moved)


def _reshape(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    before, after = graph.shape(node.input[0]), graph.shape(node.output[0])
    places = {axis: _same_place(before, after, axis) for axis in given[0]}
    kept = {axis: place for axis, place in places.items() if place is not None}
    result = {place: given[0][axis] for axis, place in kept.items()}
    return Rounding(operands=(frozenset(kept), _NONE), result=result)


def _same_place(before: Shape, after: Shape, axis: int) -> int | None:
    """Where an axis is after a reshape; None where it is split, or joined with another."""
    outer = math.prod(before[:axis])
    places = (n for n, extent in enumerate(after) if extent == before[axis])
    return next((n for n in places if math.prod(after[:n]) == outer), None)


def _concat(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    axis = _axis(node, len(graph.shape(node.input[0])))
    wanted = {a for axes in given for a, kind in axes.items() if a != axis and kind is Beyond.LAST}
    return Rounding(
        operands=(frozenset(wanted),) * len(given), result=dict.fromkeys(sorted(wanted), Beyond.LAST)
    )


def _gather(graph: Graph, node: onnx.NodeProto, given: tuple[Axes, ...]) -> Rounding | None:
    axis = _axis(node, len(graph.shape(node.input[0])))
    places = {a: kind for a, kind in given[1].items() if kind is Beyond.LAST}
    return Rounding(
        operands=(_NONE, frozenset(places)), result={axis + a: kind for a, kind in places.items()}
    )


def _axis(node: onnx.NodeProto, rank: int) -> int:
    return int(helper.get_node_attr_value(node, "axis")) % rank


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduction),
    "Concat": _concat,
    "Gather": _gather,
    "LayerNormalization": _layer_norm,
    "LogSoftmax": _log_softmax,
    "MatMul": _product,
    "Reshape": _reshape,
    "Slice": _slice,
    "Softmax": _softmax,
    "Transpose": _transpose,
}
