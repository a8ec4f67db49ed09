"""Products of one value with several constant weights become one product, whose columns are taken apart.

Only where what reads each of them moves it anyway (queries, keys and values split into heads): the slice is
fused into that, so there is a launch less for each product but one. Otherwise it would be a copy instead.
"""

from __future__ import annotations

import numpy as np
import onnx

from .graph import Graph, Type
from .products import Product, Uses, product

_MOVING = frozenset({"Transpose", "Slice", "Concat", "Pad"})


def combine_siblings(graph: Graph) -> tuple[Graph, int]:
    """The graph with such products combined, and how many products are gone."""
    found, uses = graph.copy(), Uses.of(graph)
    families: dict[tuple[str, bool], list[Product]] = {}
    for node in graph.nodes:
        one = product(graph, node, uses)
        if one is not None and _moved(one.value, uses):
            families.setdefault((one.given, one.bias is not None), []).append(one)
    combined = [family for family in families.values() if len(family) > 1]
    if not combined:
        return graph, 0
    replaced: dict[str, list[onnx.NodeProto]] = {}
    for family in combined:
        replaced |= _combined(found, family)
    nodes = [new for node in graph.nodes for new in replaced.get(node.output[0], [node])]
    return found.tidied(nodes), sum(len(family) - 1 for family in combined)


def _moved(value: str, uses: Uses) -> bool:
    """Whether the one thing that becomes of a value, seen with whatever shape, is that it is moved."""
    reader = uses.only(value)
    while reader is not None and reader.op_type == "Reshape":
        reader = uses.only(reader.output[0])
    return reader is not None and reader.op_type in _MOVING


def _combined(graph: Graph, family: list[Product]) -> dict[str, list[onnx.NodeProto]]:
    """What takes the place of the first product, and of each value."""
    first = family[0]
    rows = graph.shape(first.value)[:-1]
    widths = [graph.shape(one.weight)[1] for one in family]
    kind = Type(graph.types[first.value].elem, (*rows, sum(widths)))
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
        taken = graph.slice(name, one.value, len(rows), start, start + width)
        if one.addition is not None:
            replaced[one.node.output[0]] = []
        replaced[one.value] = [*new, taken]
        new, start = [], start + width
    return replaced
