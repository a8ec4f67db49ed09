"""Names of dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import onnx

UNNAMED: Final = "?"  # what Paddle's exporter writes for each dimension that it has no name for
# What ONNX Runtime says where sizes of one name differ: it has them share memory.
MISLED: Final = "Shape mismatch attempting to re-use buffer"


def forget_names(model: onnx.ModelProto, name: str = "") -> bool:
    """Take a name, or "" all, away from dimensions: those of one name are taken to have one size.

    Gives whether there was any.
    """
    found = False
    for info in _declared(model.graph):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param and name in ("", dim.dim_param):
                dim.ClearField("dim_param")
                found = True
    return found


def _declared(graph: onnx.GraphProto) -> Iterable[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _declared(inner)
