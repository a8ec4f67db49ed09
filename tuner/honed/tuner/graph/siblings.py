"""Products of one value with several constant weights become one product, whose columns are taken apart.

Only where what reads each of them moves it anyway (queries, keys and values split into heads) or adds it to a
product of another value: the slice is fused into that, so there is a launch less for each product but one.
Otherwise it would be a copy instead.
"""

from __future__ import annotations

import numpy as np
import onnx

from .graph import Graph, TensorType
from .products import GraphUses, Product, product

_MOVING = frozenset({"Transpose", "Slice", "Concat", "Pad"})


def combine_siblings(graph: Graph) -> tuple[Graph, int]:
    """The graph with such products combined, and how many products are gone."""
    found, uses = graph.copy(), GraphUses.of(graph)
    families: dict[tuple[str, bool], list[Product]] = {}
    for node in graph.nodes:
        one = product(graph, node, uses)
        if one is not None and moved(graph, one, uses):
            families.setdefault((one.given, one.bias is not None), []).append(one)
    combined = [family for family in families.values() if len(family) > 1]
    if not combined:
        return graph, 0
    replaced: dict[str, list[onnx.NodeProto]] = {}
    for family in combined:
        replaced |= _combined(found, family, uses)
    return found.replacing(replaced), sum(len(family) - 1 for family in combined)


def moved(graph: Graph, one: Product, uses: GraphUses) -> bool:
    """Whether all that becomes of a product is that it is moved, with whatever shape, or added to another."""
    readers = uses.all(one.value)
    if len(readers) == 1 and readers[0].op_type == "Add":
        return _added_to_product(graph, readers[0], one)
    while len(readers) == 1 and readers[0].op_type == "Reshape":
        readers = uses.all(readers[0].output[0])
    return bool(readers) and all(reader.op_type in _MOVING for reader in readers)


def _added_to_product(graph: Graph, node: onnx.NodeProto, one: Product) -> bool:
    """Whether an Add adds a product, in its own shape, to what a MatMul makes of another value."""
    same = graph.types[node.output[0]] == graph.types[one.value]
    others = [n for n in graph.nodes if n.op_type == "MatMul" and n.input[0] != one.given]
    return same and any(n.output[0] in node.input for n in others)


def _combined(graph: Graph, family: list[Product], uses: GraphUses) -> dict[str, list[onnx.NodeProto]]:
    """What takes the place of the first product, and of each value."""
    first = family[0]
    rows = graph.shape(first.value)[:-1]
    widths = [graph.shape(one.weight)[1] for one in family]
    kind = TensorType(graph.types[first.value].elem, (*rows, sum(widths)))
    weights = np.concatenate([graph.constants[one.weight] for one in family], axis=1)
    weight = graph.constant(weights, f"{first.weight}/combined")
    name = graph.unique(f"{first.node.output[0]}/combined")
    new = [graph.node("MatMul", [first.given, weight], name, kind)]
    if first.bias is not None:
        parts = [graph.constants[one.bias].reshape(-1) for one in family if one.bias is not None]
        bias = graph.constant(np.concatenate(parts), f"{first.bias}/combined")
        whole = graph.unique(f"{first.value}/combined")
        new.append(graph.node("Add", [name, bias], whole, kind))
        name = whole
    replaced: dict[str, list[onnx.NodeProto]] = {}
    start = 0
    for one, width in zip(family, widths, strict=True):
        if one.addition is not None:
            replaced[one.node.output[0]] = []
        replaced |= _taken(graph, name, one.value, slice(start, start + width), uses)
        replaced[one.value] = [*new, *replaced.get(one.value, [])]
        new, start = [], start + width
    return replaced


def _taken(
    graph: Graph, whole: str, value: str, columns: slice, uses: GraphUses
) -> dict[str, list[onnx.NodeProto]]:
    """Slices of the combined product in the place of a value, or of the slices of its columns."""
    axis, readers = len(graph.shape(value)) - 1, uses.all(value)
    if not readers or not all(_takes_columns(graph, reader, axis) for reader in readers):
        return {value: [graph.slice(whole, value, axis, columns.start, columns.stop)]}
    found = {}
    for reader in readers:
        start = columns.start + graph.numbers(reader.input[1])[0]
        end = start + graph.shape(reader.output[0])[-1]
        found[str(reader.output[0])] = [graph.slice(whole, reader.output[0], axis, start, end)]
    return found


def _takes_columns(graph: Graph, node: onnx.NodeProto, axis: int) -> bool:
    """Whether a node is a Slice of neighbours along the last axis, as the passes make them."""
    if node.op_type != "Slice" or graph.numbers(node.input[3]) != [axis]:
        return False
    return graph.numbers(node.input[4]) == [1] and graph.numbers(node.input[1])[0] >= 0
