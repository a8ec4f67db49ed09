"""Zeros that are put around an image for convolutions alone are the convolutions' own."""

from __future__ import annotations

import onnx
from onnx import helper

from .graph import Graph, copied
from .products import GraphUses

_KEPT = 2  # axes that a convolution does not pad: images and channels


def fold_pads(graph: Graph) -> tuple[Graph, int]:
    """The graph without such Pads, and how many there were."""
    found, uses, producers = graph.copy(), GraphUses.of(graph), graph.producers()
    folded = {
        node.output[0]: widths
        for node in graph.nodes
        if node.op_type == "Pad" and (widths := _widths(graph, node, uses)) is not None
    }
    if not folded:
        return graph, 0
    nodes = [
        _padding(node, producers[node.input[0]].input[0], folded[node.input[0]])
        if node.op_type == "Conv" and node.input[0] in folded
        else node
        for node in graph.nodes
    ]
    return found.tidied(nodes), len(folded)


def _widths(graph: Graph, node: onnx.NodeProto, uses: GraphUses) -> list[int] | None:
    """How much a Pad adds before and behind each axis of an image; None where it is not for convolutions."""
    readers = uses.all(node.output[0])
    image = all(one.op_type == "Conv" and one.input[1] != node.output[0] for one in readers)
    if not readers or not image or graph.constants[node.input[2]].any():
        return None
    amounts, rank = graph.numbers(node.input[1]), len(graph.shape(node.input[0]))
    before, behind = amounts[:rank], amounts[rank:]
    if any(before[:_KEPT]) or any(behind[:_KEPT]) or min(amounts) < 0:
        return None
    return [*before[_KEPT:], *behind[_KEPT:]]


def _padding(node: onnx.NodeProto, image: str, widths: list[int]) -> onnx.NodeProto:
    """The convolution with that much more padding, of the image that is not padded yet."""
    made = copied(node)
    made.input[0] = image
    (pads,) = (attribute for attribute in made.attribute if attribute.name == "pads")
    total = [own + more for own, more in zip(pads.ints, widths, strict=True)]
    pads.CopyFrom(helper.make_attribute("pads", total))
    return made
