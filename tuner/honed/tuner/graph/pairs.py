"""Joins two neighbouring slices of a value that go through equal operators, which then compute both at once.

An example is the rotary encoding of queries and keys, which lie side by side in the result of one product.
The joined result is sliced where products read it; where one of the two is transposed for that, both are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import onnx

from .graph import Graph, Replaced, Shape, TensorType, axis_of, perm_of

_UNARY = frozenset({"Neg", "Cast", "Relu", "Tanh", "Sigmoid", "Erf", "Exp", "Sqrt", "Abs", "Cos", "Sin"})
_BINARY = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"})


@dataclass(slots=True)
class _Pair:
    """A region that both slices have: for each value of the first the second's, and the axis of the join.

    `nodes` are those of the first, in order, from the slice on.
    """

    nodes: list[onnx.NodeProto]
    others: dict[str, str]
    axes: dict[str, int]


def join_pairs(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with pairs of neighbouring slices joined, and how many nodes are gone."""
    found = graph.copy()
    replaced: Replaced = {}
    places = {node.output[0]: n for n, node in enumerate(graph.nodes)}
    joined = 0
    for first, second in _neighbours(graph):
        pair = _grow(graph, places, first, second)
        ends = _ends(graph, pair)
        computes = any(node.op_type in _UNARY | _BINARY for node in pair.nodes)
        if computes and ends is not None and not replaced.keys() & {first.output[0], second.output[0]}:
            replaced |= _replace(found, pair, *ends)
            joined += 1
    return found.replacing(replaced), joined


def _neighbours(graph: Graph) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """Yield slices of equal width along one axis of a value, the second beginning where the first ends."""
    for value in graph.makers:
        begins = {b: node for node in graph.uses(value) if (b := graph.bounds(node)) is not None}
        for node in graph.uses(value):
            if (found := graph.bounds(node)) is not None:
                axis, start, end = found
                if (other := begins.get((axis, end, 2 * end - start))) is not None:
                    yield node, other


def _grow(graph: Graph, places: dict[str, int], first: onnx.NodeProto, second: onnx.NodeProto) -> _Pair:
    """Return the largest region that two slices have in common; `places` are those of nodes in the graph."""
    value, (axis,) = first.output[0], graph.numbers(first.input[3])
    pair = _Pair([first], {value: second.output[0]}, {value: axis})
    waiting = [places[node.output[0]] for node in graph.readers.get(value, [])]
    heapq.heapify(waiting)
    while waiting:  # The readers of the region, in the order of the graph
        node = graph.nodes[heapq.heappop(waiting)]
        along = None if node.output[0] in pair.others else _axis_after(graph, node, pair)
        twin = _twin(graph, node, pair) if along is not None else None
        if along is not None and twin is not None:
            pair.nodes.append(node)
            pair.others[node.output[0]] = twin.output[0]
            pair.axes[node.output[0]] = along
            for reader in graph.readers.get(node.output[0], []):
                heapq.heappush(waiting, places[reader.output[0]])
    return pair


def _twin(graph: Graph, node: onnx.NodeProto, pair: _Pair) -> onnx.NodeProto | None:
    """Return the node that computes from the second's values what `node` computes from the first's."""
    given = next(name for name in node.input if name in pair.others)
    for other in graph.readers.get(pair.others[given], []):
        alike = other.op_type == node.op_type and list(other.attribute) == list(node.attribute)
        typed = graph.types[other.output[0]] == graph.types[node.output[0]]
        if alike and typed and len(other.input) == len(node.input):
            operands = zip(node.input, other.input, strict=True)
            if all(_match(graph, one, its, pair) for one, its in operands):
                return other
    return None


def _match(graph: Graph, one: str, other: str, pair: _Pair) -> bool:
    """Return whether an operand of the second's node corresponds to the first's operand `one`."""
    if one in pair.others:
        return pair.others[one] == other
    if one in graph.constants and other in graph.constants:
        return graph.digest(one) == graph.digest(other)
    return one == other


def _axis_after(graph: Graph, node: onnx.NodeProto, pair: _Pair) -> int | None:
    """Return the axis along which the results of a node and its counterpart are parts of one, or None."""
    shape = graph.shape(node.output[0])
    axes = {len(shape) - len(graph.shape(n)) + pair.axes[n] for n in node.input if n in pair.others}
    (given, *rest) = node.input
    if node.op_type in _UNARY:
        return pair.axes[given]
    if node.op_type in _BINARY:
        return _broadcast_axis(graph, node, pair, axes)
    if given not in pair.others:
        return None
    axis = pair.axes[given]
    if node.op_type == "Transpose":
        return perm_of(node).index(axis)
    if node.op_type == "Reshape":
        return _find_axis_after(graph.shape(given), axis, shape)
    if node.op_type == "Slice" and graph.bounds(node) is not None:
        return axis if graph.numbers(rest[2]) != [axis] else None
    if node.op_type == "Concat" and len(axes) == 1 and all(name in pair.others for name in node.input):
        along = axis_of(node, len(shape))
        return axis if along != axis else None
    return None


def _broadcast_axis(graph: Graph, node: onnx.NodeProto, pair: _Pair, axes: set[int]) -> int | None:
    """Return the axis of a result along which the pair's operands extend, and no other operand does.

    Returns None where there is no such axis.
    """
    axis, shape = min(axes), graph.shape(node.output[0])
    if len(axes) != 1:
        return None
    wanted = {name: shape[axis] if name in pair.others else 1 for name in node.input}
    fit = (_extent(graph.shape(name), axis - len(shape)) == extent for name, extent in wanted.items())
    return axis if all(fit) else None


def _extent(shape: Shape, axis: int) -> int:
    """Return the extent of an axis counted from the last; 1 where there is none."""
    return shape[axis] if -axis <= len(shape) else 1


def _find_axis_after(before: Shape, axis: int, after: Shape) -> int | None:
    """Return the axis along which parts are joined after a reshape of each; None where there is none."""
    outer = math.prod(before[:axis])
    return next((n for n, extent in enumerate(after) if math.prod(after[:n]) == outer and extent > 1), None)


def _ends(graph: Graph, pair: _Pair) -> tuple[str, list[int] | None] | None:
    """Return the first's only value that others read, and the transpose of one of the two.

    Returns None where there are several such values, or none; the transpose is None where neither is
    transposed.
    """
    ends = [name for name in pair.others if graph.leaves(name, pair.others)]
    seconds = set(pair.others.values())
    if len(ends) != 1 or any(
        user.output[0] not in seconds
        for other in seconds - {pair.others[ends[0]]}
        for user in graph.readers.get(other, [])
    ):
        return None
    both = (ends[0], pair.others[ends[0]])
    if not all(_for_products(graph, value) for value in both):
        return None
    turned = (_transpose(graph, value) for value in both)
    return ends[0], next((perm_of(node) for node in turned if node is not None), None)


def _for_products(graph: Graph, value: str) -> bool:
    """Return whether only products read a value, as it is or transposed: they read slices in place.

    Any other reader would be fused with earlier operators, or need a copy.
    """
    turned = _transpose(graph, value)
    readers = graph.uses(value if turned is None else turned.output[0])
    return bool(readers) and all(reader.op_type == "MatMul" for reader in readers)


def _transpose(graph: Graph, value: str) -> onnx.NodeProto | None:
    """Return the node that transposes a value, where nothing else reads it."""
    node = graph.only(value)
    return node if node is not None and node.op_type == "Transpose" else None


def _replace(graph: Graph, pair: _Pair, end: str, perm: Sequence[int] | None) -> Replaced:
    """Return what replaces the nodes of both slices, by the values of these nodes."""
    names = {name: graph.unique(f"{name}/pairs") for name in pair.others}
    replaced: Replaced = {name: [] for pair_of in pair.others.items() for name in pair_of}
    new = [_of_both(graph, node, pair, names) for node in pair.nodes]
    whole, axis = names[end], pair.axes[end]
    back: list[int] | None = None
    if perm is not None:
        turned, kind = graph.unique(f"{whole}/turned"), graph.types[whole]
        kind = TensorType(kind.elem, tuple(kind.shape[p] for p in perm))
        new.append(graph.node("Transpose", [whole], turned, kind, perm=perm))
        back = [perm.index(n) for n in range(len(perm))]
        whole, axis = turned, perm.index(axis)
    width = graph.shape(whole)[axis] // 2
    for n, value in enumerate((end, pair.others[end])):
        part = value if back is None else graph.unique(f"{value}/part")
        new.append(graph.slice(whole, part, axis, n * width, (n + 1) * width))
        if back is not None:
            new.append(graph.node("Transpose", [part], value, graph.types[value], perm=back))
    replaced[end] = new
    return replaced


def _of_both(graph: Graph, node: onnx.NodeProto, pair: _Pair, names: dict[str, str]) -> onnx.NodeProto:
    """Return a node that computes both halves, in place of the first's."""
    value = node.output[0]
    name, kind, axis = names[value], graph.types[value], pair.axes[value]
    both = kind.along(axis, 2 * kind.shape[axis])
    if node is pair.nodes[0]:
        (start,) = graph.numbers(node.input[1])
        return graph.slice(node.input[0], name, axis, start, start + both.shape[axis])
    if node.op_type == "Reshape":
        return graph.reshape(names[node.input[0]], name, both.shape)
    copy = deepcopy(node)
    copy.input[:] = [names.get(given, given) for given in node.input]
    copy.output[0] = copy.name = name
    graph.types[name] = both
    return copy
