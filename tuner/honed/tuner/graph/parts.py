"""A product of two values that were joined is a sum of two products, where one can join a sibling.

As of a feed-forward network that reads what an attention gave beside what it was given, which its queries,
keys and values are products of as well. The sum is computed with the product, so the copy is saved.
"""

from __future__ import annotations

import onnx

from .graph import Graph, axis_of
from .products import GraphUses, Product, product
from .siblings import moved


def split_parts(graph: Graph) -> tuple[Graph, int]:
    """The graph with such products of both parts, and how many concatenations are gone."""
    found, uses, producers = graph.copy(), GraphUses.of(graph), graph.producers()
    products = [one for node in graph.nodes if (one := product(graph, node, uses)) is not None]
    siblings = {(one.given, one.bias is not None) for one in products if moved(graph, one, uses)}
    replaced: dict[str, list[onnx.NodeProto]] = {}
    for one in products:
        joined = producers.get(one.given)
        if joined is None or not _joins_rows(graph, joined) or uses.only(one.given) is None:
            continue
        kept = [n for n, value in enumerate(joined.input) if (value, one.bias is not None) in siblings]
        if kept:
            replaced |= _split(found, one, list(joined.input), kept[0])
    if not replaced:
        return graph, 0
    return found.replacing(replaced), sum(any(n.op_type == "Add" for n in new) for new in replaced.values())


def _joins_rows(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether two different values are joined along the last axis."""
    if node.op_type != "Concat" or len(node.input) != 2 or node.input[0] == node.input[1]:
        return False
    rank = len(graph.shape(node.output[0]))
    return axis_of(node, rank) == rank - 1


def _split(graph: Graph, one: Product, parts: list[str], sibling: int) -> dict[str, list[onnx.NodeProto]]:
    """What takes the place of a product and its bias; the bias goes to the part that has a sibling."""
    kind, weight = graph.types[one.value], graph.constants[one.weight]
    border = graph.shape(parts[0])[-1]
    blocks = (weight[:border], weight[border:])
    made: list[onnx.NodeProto] = []
    terms: list[str] = []
    for part, block in zip(parts, blocks, strict=True):
        constant = graph.constant(block, f"{one.weight}/part")
        terms.append(graph.unique(f"{one.node.output[0]}/part"))
        made.append(graph.node("MatMul", [part, constant], terms[-1], kind))
    if one.bias is not None:
        biased = graph.unique(f"{one.value}/part")
        made.append(graph.node("Add", [terms[sibling], one.bias], biased, kind))
        terms[sibling] = biased
    made.append(graph.node("Add", [terms[1 - sibling], terms[sibling]], one.value, kind))
    return {one.node.output[0]: [], one.value: made}
