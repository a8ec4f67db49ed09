"""Dimensions without a name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import onnx

UNNAMED: Final = "?"  # what Paddle's exporter writes for each dimension that it has no name for


def forget_unnamed(model: onnx.ModelProto) -> bool:
    """Take UNNAMED away where it stands as a name: dimensions of one name have one size, and these do not.

    Gives whether it stood anywhere.
    """
    found = False
    for info in _declared(model.graph):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param == UNNAMED:
                dim.ClearField("dim_param")
                found = True
    return found


def _declared(graph: onnx.GraphProto) -> Iterable[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _declared(inner)
