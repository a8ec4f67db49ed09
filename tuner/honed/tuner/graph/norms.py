"""A layer normalisation that an exporter took apart becomes one operator, and with it one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from .graph import Array, Graph
from .products import WIDE, GraphUses, by_rows


@dataclass(frozen=True, slots=True)
class _Norm:
    """`value` is `given` less its mean, over its deviation, by `scale` [n], plus `offset` [n], along rows."""

    given: str
    epsilon: float
    scale: Array
    offset: Array
    value: str


def join_norms(graph: Graph) -> tuple[Graph, int]:
    """The graph with LayerNormalization wherever its parts stand, and how often they did."""
    found, uses, made = graph.copy(), GraphUses.of(graph), graph.producers()
    replaced = {}
    for node in graph.nodes:
        one = _norm(graph, node, made, uses)
        if one is not None:
            replaced[one.value] = _operator(found, one)
    if not replaced:
        return graph, 0
    return found.tidied(replaced.get(node.output[0], node) for node in graph.nodes), len(replaced)


def _norm(
    graph: Graph, node: onnx.NodeProto, made: dict[str, onnx.NodeProto], uses: GraphUses
) -> _Norm | None:
    """What a Div of a centred value by its deviation is, with what follows; None where it is no such one."""
    if node.op_type != "Div" or graph.types[node.output[0]].elem not in WIDE:
        return None
    centred, deviation = (made.get(name) for name in node.input)
    if centred is None or centred.op_type != "Sub" or deviation is None or deviation.op_type != "Sqrt":
        return None
    given, mean = centred.input
    shifted = made.get(deviation.input[0])
    if _meant(graph, made.get(mean)) != given or shifted is None or shifted.op_type != "Add":
        return None
    variance, epsilon = _constant_last(graph, shifted)
    square = made.get(_meant(graph, made.get(variance)))
    if square is None or square.op_type != "Mul" or set(square.input) != {centred.output[0]}:
        return None
    inner = (mean, square.output[0], variance, shifted.output[0], deviation.output[0])
    alone = len(uses.all(centred.output[0])) == 2 and all(uses.only(name) is not None for name in inner)
    if not alone or epsilon not in graph.constants or graph.constants[epsilon].size != 1:
        return None
    like = np.ones(graph.shape(given)[-1:], graph.constants[epsilon].dtype)
    value, scale = _step(graph, uses, "Mul", node.output[0], like)
    value, offset = _step(graph, uses, "Add", value, np.zeros_like(like))
    return _Norm(given, float(graph.constants[epsilon].item()), scale, offset, value)


def _meant(graph: Graph, node: onnx.NodeProto | None) -> str:
    """The value whose mean along rows a node is, as its shape tells; empty where it is something else."""
    if node is None or node.op_type != "ReduceMean":
        return ""
    along = graph.shape(node.output[0]) == (*graph.shape(node.input[0])[:-1], 1)
    return str(node.input[0]) if along else ""


def _constant_last(graph: Graph, node: onnx.NodeProto) -> tuple[str, str]:
    one, other = node.input
    return (other, one) if one in graph.constants else (one, other)


def _step(graph: Graph, uses: GraphUses, op: str, value: str, neutral: Array) -> tuple[str, Array]:
    """What comes of a value and the constant that is next done to its rows; the value where there is none."""
    reader = uses.only(value)
    constant = by_rows(graph, reader, op, value) if reader is not None else None
    if reader is None or constant is None:
        return value, neutral
    return str(reader.output[0]), graph.constants[constant].reshape(-1)


def _operator(graph: Graph, one: _Norm) -> onnx.NodeProto:
    scale = graph.constant(one.scale, f"{one.value}/scale")
    offset = graph.constant(one.offset, f"{one.value}/offset")
    kind = graph.types[one.value]
    attributes = {"axis": len(kind.shape) - 1, "epsilon": one.epsilon}
    return graph.node("LayerNormalization", (one.given, scale, offset), one.value, kind, **attributes)
