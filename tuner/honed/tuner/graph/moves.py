"""Restores operators that exporters split: transposes written as slices, layer normalisations.

Exporters write cells cut out of an image (unfolds whose windows do not overlap, space to depth, patches
merged) as a slice for each offset or window and a concatenation: hundreds of nodes that move each element
once. Applying the nodes to the places of the elements shows the move that they amount to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from .graph import Array, Graph, Replaced, Shape, TensorType, perm_of
from .products import WIDE, by_rows

_MOVING = frozenset({"Reshape", "Transpose", "Slice", "Concat"})
_MOST_ELEMENTS = 1 << 24  # Elements whose places are followed: 64 MiB, and as much for each concatenation


def join_moves(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with transposes for nodes that move elements, and how many values they make."""
    found = graph.copy()
    order = {node.output[0]: n for n, node in enumerate(graph.nodes)}
    replaced: Replaced = {}
    dropped: set[str] = set()  # Values that nothing reads any more, and those that are made otherwise
    needed = set(graph.outputs)
    for node in reversed(graph.nodes):
        value = node.output[0]
        if value not in needed and all(
            reader.output[0] in dropped for reader in graph.readers.get(value, ())
        ):
            dropped.add(value)
            continue
        for source, nodes in reversed(_trees(graph, value, order)):
            turn = _turn(graph, source, nodes, value)
            if turn is not None:
                replaced[value] = _transpose(found, source, value, *turn)
                dropped.add(value)
                needed.add(source)
                break
    return found.replacing(replaced), len(replaced)


def _trees(graph: Graph, value: str, order: Mapping[str, int]) -> list[tuple[str, list[onnx.NodeProto]]]:
    """Return the values from which moving and joining alone make a value, the nearest first.

    Each comes with all nodes between the two.
    """
    nodes: list[onnx.NodeProto] = []
    found: list[tuple[str, list[onnx.NodeProto]]] = []
    given, joins = {value}, False
    while True:
        latest = max(given, key=lambda name: order.get(name, -1))
        node = graph.makers.get(latest)
        if node is None or node.op_type not in _MOVING:
            return found
        joins |= node.op_type == "Concat"
        nodes.append(node)
        given.remove(latest)
        given.update(node.input if node.op_type == "Concat" else node.input[:1])
        if joins and len(given) == 1:
            found.append((min(given), nodes[::-1]))


def _turn(
    graph: Graph, source: str, nodes: Sequence[onnx.NodeProto], value: str
) -> tuple[Shape, list[int]] | None:
    """Return the transpose that nodes amount to: extents of the axes of its operand, and their order.

    Returns None where they are no transpose, or the value is too large to find out.
    """
    count = math.prod(graph.shape(source))
    if not 0 < count == math.prod(graph.shape(value)) <= _MOST_ELEMENTS:
        return None
    places = {source: np.arange(count, dtype=np.int32).reshape(graph.shape(source))}
    for node in nodes:
        places[node.output[0]] = _move_places(graph, node, places)
    axes = _axes(places[value].reshape(-1))
    if axes is None:
        return None
    outer_first = sorted(range(len(axes)), key=lambda n: -axes[n][1])
    inside = 1
    for n in reversed(outer_first):
        extent, stride = axes[n]
        if stride != inside:
            return None
        inside *= extent
    return tuple(axes[n][0] for n in outer_first), [outer_first.index(n) for n in range(len(axes))]


def _move_places(graph: Graph, node: onnx.NodeProto, places: Mapping[str, Array]) -> Array:
    """Return the places of elements after a node that moves them."""
    given = places[node.input[0]]
    if node.op_type == "Reshape":
        return given.reshape(graph.shape(node.output[0]))
    if node.op_type == "Transpose":
        return given.transpose(perm_of(node))
    if node.op_type == "Concat":
        parts = [places[name] for name in node.input]
        return np.concatenate(parts, axis=int(helper.get_node_attr_value(node, "axis")))
    cuts = [slice(None)] * given.ndim
    for start, end, axis, step in zip(*(graph.numbers(name) for name in node.input[1:5]), strict=True):
        cuts[axis] = slice(start, None if end < -given.shape[axis] else end, step)
    taken: Array = given[tuple(cuts)]
    return taken


def _axes(places: Array) -> list[tuple[int, int]] | None:
    """Return extents and strides of the axes, outer ones first, that count through places, or None."""
    found: list[tuple[int, int]] = []
    while len(places) > 1:
        stride = int(places[1] - places[0])
        breaks = np.flatnonzero(np.diff(places) != stride)
        extent = int(breaks[0]) + 1 if breaks.size else len(places)
        if len(places) % extent:
            return None
        rows = places.reshape(-1, extent)
        if (rows != rows[:, :1] + stride * np.arange(extent, dtype=np.int32)).any():
            return None
        found.append((extent, stride))
        places = rows[:, 0]
    return found[::-1]


def _transpose(
    graph: Graph, source: str, value: str, extents: Shape, perm: Sequence[int]
) -> list[onnx.NodeProto]:
    """Return nodes that make `value` from `source`.

    A leading axis of 1 stays one, because other passes rely on it.
    """
    elem, shape = graph.types[source].elem, graph.shape(value)
    ones = (1,) if shape[:1] == graph.shape(source)[:1] == (1,) else ()
    extents, perm = (*ones, *extents), [*range(len(ones)), *(len(ones) + axis for axis in perm)]
    split, turned = graph.unique(f"{value}/split"), graph.unique(f"{value}/turned")
    kind = TensorType(elem, tuple(extents[axis] for axis in perm))
    return [
        graph.reshape(source, split, extents),
        graph.node("Transpose", [split], turned, kind, perm=perm),
        graph.reshape(turned, value, shape),
    ]


def join_norms(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with LayerNormalization in place of its parts, and how many there are."""
    found = graph.copy()
    made = [one for node in graph.nodes if (one := _norm(graph, found, node)) is not None]
    replaced = {one.output[0]: one for one in made}
    return found.tidy(replaced.get(node.output[0], node) for node in graph.nodes), len(made)


def _norm(graph: Graph, to: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return a LayerNormalization in `to` for a Div of a centred value by its deviation, and later nodes.

    Returns None where the node is no such Div.
    """
    if node.op_type != "Div" or graph.types[node.output[0]].elem not in WIDE:
        return None
    made = graph.makers
    centred, deviation = (made.get(name) for name in node.input)
    if centred is None or centred.op_type != "Sub" or deviation is None or deviation.op_type != "Sqrt":
        return None
    given, mean = centred.input
    shifted = made.get(deviation.input[0])
    if _mean_source(graph, made.get(mean)) != given or shifted is None or shifted.op_type != "Add":
        return None
    variance, epsilon = shifted.input
    if variance in graph.constants:
        variance, epsilon = epsilon, variance
    square = made.get(_mean_source(graph, made.get(variance)))
    if square is None or square.op_type != "Mul" or set(square.input) != {centred.output[0]}:
        return None
    inner = (mean, square.output[0], variance, shifted.output[0], deviation.output[0])
    alone = len(graph.uses(centred.output[0])) == 2 and all(graph.only(name) is not None for name in inner)
    if not alone or epsilon not in graph.constants or graph.constants[epsilon].size != 1:
        return None
    ones = np.ones(graph.shape(given)[-1:], graph.constants[epsilon].dtype)
    value, scale = _step(graph, "Mul", node.output[0], ones)
    value, offset = _step(graph, "Add", value, np.zeros_like(ones))
    inputs = (given, to.constant(scale, f"{value}/scale"), to.constant(offset, f"{value}/offset"))
    kind, least = graph.types[value], float(graph.constants[epsilon].item())
    return to.node("LayerNormalization", inputs, value, kind, axis=len(kind.shape) - 1, epsilon=least)


def _mean_source(graph: Graph, node: onnx.NodeProto | None) -> str:
    """Return the value whose mean along rows a node computes, by its shape; empty for other nodes."""
    if node is None or node.op_type != "ReduceMean":
        return ""
    along = graph.shape(node.output[0]) == (*graph.shape(node.input[0])[:-1], 1)
    return str(node.input[0]) if along else ""


def _step(graph: Graph, op: str, value: str, neutral: Array) -> tuple[str, Array]:
    """Return the result and the constant of the Add or Mul (`op`) that alone reads the rows of a value.

    Returns the value itself and `neutral` where there is no such node.
    """
    reader = graph.only(value)
    constant = by_rows(graph, reader, op, value) if reader is not None else None
    if reader is None or constant is None:
        return value, neutral
    return str(reader.output[0]), graph.constants[constant].reshape(-1)
