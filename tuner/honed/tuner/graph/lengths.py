"""Rounds up lengths that no tile divides: a sequence of 197 tokens is computed as one of 208.

A prime number of rows has neither tiles nor vectors, on any device. Elements beyond the last one of such an
axis repeat it, so that they are as finite as that and elementwise operators treat them equally, or they are
zeros. A mask excludes them from softmaxes, and they are cut off before operators that would use them, and
from outputs. One rule for each kind of operator says which axes of its result are rounded up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import onnx

from .graph import ELEMENTWISE, REDUCTIONS, Graph, Shape, TensorType, axis_of, perm_of


class Beyond(Enum):
    """The contents of a rounded axis beyond its last element."""

    LAST = "the last again"
    ZERO = "zeros"


Axes = Mapping[int, Beyond]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The rounding of a node: the axes of each operand that are rounded up, and those of the result."""

    operands: tuple[frozenset[int], ...]
    result: Axes
    masked: int | None = None  # An axis of the first operand whose elements beyond the last must not count


Rule = Callable[[Graph, onnx.NodeProto, tuple[Axes, ...]], "Rounding | None"]
_NONE: frozenset[int] = frozenset()


def rounding(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    """Return how a node accepts operands of which the axes in `rounded` are rounded up; None: only unrounded.

    Axes of an operand that the answer leaves out are to be cut off.
    """
    rule = _RULES.get(node.op_type)
    found = rule(graph, node, rounded) if rule is not None and any(rounded) else None
    return found if found is not None and any(found.operands) else None


def _elementwise(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    rank = len(graph.shape(node.output[0]))
    shifts = [rank - len(graph.shape(name)) for name in node.input]
    if any(kind is Beyond.ZERO for axes in rounded for kind in axes.values()):
        return None
    wanted = {axis + shift for axes, shift in zip(rounded, shifts, strict=True) for axis in axes}
    operands = tuple(
        frozenset(a - shift for a in wanted if a >= shift and graph.shape(name)[a - shift] > 1)
        for name, shift in zip(node.input, shifts, strict=True)
    )
    return Rounding(operands=operands, result=dict.fromkeys(wanted, Beyond.LAST))


def _product(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    ranks = [len(graph.shape(name)) for name in node.input]
    if min(ranks) < 2:
        return None
    rank = max(ranks)
    summed = [rounded[0].get(ranks[0] - 1), rounded[1].get(ranks[1] - 2)]
    kept = Beyond.ZERO in summed
    operands, result = [], set[int]()
    for n, (axes, own) in enumerate(zip(rounded, ranks, strict=True)):
        terms = own - 1 - n
        mine = {axis for axis, kind in axes.items() if axis != terms and kind is Beyond.LAST}
        result |= {axis + rank - own for axis in mine}
        operands.append(frozenset(mine | ({terms} if kept else set())))
    for n, own in enumerate(ranks):  # Batches are those of both operands
        shape = graph.shape(node.input[n])
        batches = (axis - rank + own for axis in result if axis < rank - 2)
        operands[n] |= {axis for axis in batches if axis >= 0 and shape[axis] > 1}
    return Rounding(operands=tuple(operands), result=dict.fromkeys(result, Beyond.LAST))


def _softmax(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    axis = axis_of(node, len(graph.shape(node.input[0])))
    found = _beside(rounded, set())
    if axis not in found.result:
        return found
    return replace(found, result={**found.result, axis: Beyond.ZERO}, masked=axis)


def _log_softmax(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    return _beside(rounded, {axis_of(node, len(graph.shape(node.input[0])))})


def _layer_norm(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    rank = len(graph.shape(node.input[0]))
    return _beside(rounded, set(range(axis_of(node, rank), rank)))


def _slice(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    rank = len(graph.shape(node.input[0]))
    return _beside(rounded, {axis % rank for axis in graph.numbers(node.input[3])})


def _reduction(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    rank = len(graph.shape(node.input[0]))
    summed = {axis % rank for axis in graph.numbers(node.input[1])}
    found = _beside(rounded, summed)
    if len(graph.shape(node.output[0])) == rank:
        return found
    kept = [axis for axis in range(rank) if axis not in summed]
    return replace(found, result={kept.index(axis): kind for axis, kind in found.result.items()})


def _beside(rounded: tuple[Axes, ...], taken: set[int]) -> Rounding:
    """Return the rounding of an operator that treats places along all axes but `taken` independently.

    The axes are those of its first operand.
    """
    kept = {axis: kind for axis, kind in rounded[0].items() if axis not in taken and kind is Beyond.LAST}
    return Rounding(operands=(frozenset(kept), *(_NONE,) * (len(rounded) - 1)), result=kept)


def _transpose(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    order = perm_of(node)
    moved = {order.index(axis): kind for axis, kind in rounded[0].items()}
    return Rounding(operands=(frozenset(rounded[0]),), result=moved)


def _reshape(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    before, after = graph.shape(node.input[0]), graph.shape(node.output[0])
    places = {axis: _same_place(before, after, axis) for axis in rounded[0]}
    kept = {axis: place for axis, place in places.items() if place is not None}
    result = {place: rounded[0][axis] for axis, place in kept.items()}
    return Rounding(operands=(frozenset(kept), _NONE), result=result)


def _same_place(before: Shape, after: Shape, axis: int) -> int | None:
    """Return the number of an axis after a reshape; None where it is split, or merged with another."""
    outer = math.prod(before[:axis])
    places = (n for n, extent in enumerate(after) if extent == before[axis])
    return next((n for n in places if math.prod(after[:n]) == outer), None)


def _concat(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    axis = axis_of(node, len(graph.shape(node.input[0])))
    wanted = {a for axes in rounded for a, kind in axes.items() if a != axis and kind is Beyond.LAST}
    return Rounding(
        operands=(frozenset(wanted),) * len(rounded), result=dict.fromkeys(sorted(wanted), Beyond.LAST)
    )


def _gather(graph: Graph, node: onnx.NodeProto, rounded: tuple[Axes, ...]) -> Rounding | None:
    axis = axis_of(node, len(graph.shape(node.input[0])))
    places = {a: kind for a, kind in rounded[1].items() if kind is Beyond.LAST}
    return Rounding(
        operands=(_NONE, frozenset(places)), result={axis + a: kind for a, kind in places.items()}
    )


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


_LEAST = 32  # Shorter ones are mostly no sequences, and rounding adds much to them
_DIVIDES = 4  # Lengths that it divides remain: the shortest vectors, and tiles of rows
# Thresholds and the multiples from there on: at most an eighth more
_ROUND = ((128, 16), (64, 8), (_LEAST, 4))
_SHARE = 0.2  # Least share of the operations of all products that products of that length must have
_PRODUCTS = 2  # Least number of products for each value that is extended or cut off


def pad_lengths(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with lengths rounded up, and how many products have such a length."""
    times = 0
    for length in _lengths(graph):
        rewriting = _Rewriting(graph, length)
        found = rewriting.graph_of_all()
        if rewriting.products >= _PRODUCTS * max(1, rewriting.changes):
            graph, times = found, times + rewriting.products
    return graph, times


def _lengths(graph: Graph) -> list[int]:
    """Return the lengths to round up: rows and columns of products, those of most operations first.

    Rows and columns of constants are not rounded up.
    """
    found, total = Counter[int](), 0
    for node in graph.nodes:
        if node.op_type != "MatMul" or min(len(graph.shape(name)) for name in node.input) < 2:
            continue
        operations = math.prod(graph.shape(node.output[0])) * graph.shape(node.input[0])[-1]
        total += operations
        places = {-2 + n for n, name in enumerate(node.input) if name not in graph.constants}
        for length in {graph.shape(node.output[0])[place] for place in places}:
            if length >= _LEAST and length % _DIVIDES:
                found[length] += operations
    return [length for length, count in found.most_common() if count >= _SHARE * total]


def _round_up(length: int) -> int:
    multiple = next(multiple for least, multiple in _ROUND if length >= least)
    return -(-length // multiple) * multiple


class _Rewriting:
    """A walk along a graph with one length rounded up."""

    def __init__(self, graph: Graph, length: int) -> None:
        self._old = graph
        self._graph = graph.copy()
        self._length, self._more = length, _round_up(length)
        self._axes: dict[str, Axes] = {}  # Axes of values that are rounded up
        self._made: dict[tuple[str, frozenset[int]], str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self.products = 0  # Products of rounded lengths
        self.changes = 0  # Values that are extended or cut off

    def graph_of_all(self) -> Graph:
        """Return the whole graph, rewritten."""
        for name in self._old.inputs:
            axes = {n for n, extent in enumerate(self._old.shape(name)) if extent == self._length}
            if axes:
                self._axes[name] = dict.fromkeys(axes, Beyond.LAST)
        for node in self._old.nodes:
            self._take(node)
        for name in self._old.outputs:
            self._version(name, frozenset())
        return self._graph.tidy(self._nodes)

    def _take(self, node: onnx.NodeProto) -> None:
        given = tuple(self._axes.get(name, {}) for name in node.input)
        found = rounding(self._old, node, given)
        if found is None:
            for name in node.input:
                self._version(name, frozenset())
            self._nodes.append(node)
        else:
            self._rewrite(node, found)

    def _rewrite(self, node: onnx.NodeProto, rule: Rounding) -> None:
        name = node.output[0]
        operands = [self._version(*one) for one in zip(node.input, rule.operands, strict=True)]
        if rule.masked is not None:
            operands[0] = self._mask(operands[0], rule.masked, f"{name}/scores")
        made = deepcopy(node)
        made.input[:] = operands
        made.output[0] = made.name = self._new_name(name, rule.result)
        kind = self._old.types[name]
        shape = tuple(self._more if n in rule.result else extent for n, extent in enumerate(kind.shape))
        if node.op_type == "Reshape":
            made.input[1] = self._graph.constant(np.array(shape, np.int64), f"{made.name}/shape")
        self._graph.types[made.name] = TensorType(kind.elem, shape)
        self._nodes.append(made)
        self.products += node.op_type == "MatMul"
        if rule.result:
            self._axes[name] = rule.result
            self._made[name, frozenset(rule.result)] = made.name

    def _new_name(self, name: str, axes: Iterable[int]) -> str:
        """Return the name of a value: its own where none of its axes is rounded up."""
        return self._graph.unique(f"{name}/rounded") if set(axes) else name

    def _version(self, name: str, axes: frozenset[int]) -> str:
        """Return a value in which exactly these axes are rounded up."""
        there = self._axes.get(name, {})
        if axes == (frozenset() if name in self._old.inputs else frozenset(there)):
            return self._made.get((name, axes), name)
        if (name, axes) not in self._made:
            self._made[name, axes] = self._change(name, axes)
        return self._made[name, axes]

    def _change(self, name: str, axes: frozenset[int]) -> str:
        if name in self._old.constants:
            array = self._old.constants[name]
            for axis in axes:
                beside = [(0, 0)] * array.ndim
                beside[axis] = (0, self._more - self._length)
                array = np.pad(array, beside, mode="edge")
            return self._graph.constant(array, f"{name}/rounded")
        self.changes += 1
        has = frozenset[int]() if name in self._old.inputs else frozenset(self._axes.get(name, {}))
        value = self._made.get((name, has), name)
        steps = [*((axis, False) for axis in has - axes), *((axis, True) for axis in axes - has)]
        for n, (axis, longer) in enumerate(sorted(steps)):
            last = n == len(steps) - 1
            to = self._new_name(name, axes) if last else self._graph.unique(f"{name}/part")
            if longer:
                self._nodes += self._longer(value, to, axis)
            else:
                self._nodes.append(self._graph.slice(value, to, axis, 0, self._length))
            value = to
        return value

    def _longer(self, value: str, to: str, axis: int) -> Iterator[onnx.NodeProto]:
        """Yield nodes that repeat the last element of an axis."""
        last = self._graph.unique(f"{to}/last")
        yield self._graph.slice(value, last, axis, self._length - 1, self._length)
        parts = (value, *(last,) * (self._more - self._length))
        yield self._graph.node(
            "Concat", parts, to, self._graph.types[value].along(axis, self._more), axis=axis
        )

    def _mask(self, value: str, axis: int, to: str) -> str:
        """Return the value with the lowest number of its type added beyond the last element of an axis."""
        kind = self._graph.types[value]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem)
        mask = np.zeros([self._more if n == axis else 1 for n in range(len(kind.shape))], dtype)
        beyond = [slice(None)] * mask.ndim
        beyond[axis] = slice(self._length, None)
        mask[tuple(beyond)] = np.finfo(dtype).min
        taken = self._graph.unique(to)
        added = (value, self._graph.constant(mask, f"{taken}/mask"))
        self._nodes.append(self._graph.node("Add", added, taken, kind))
        return taken
