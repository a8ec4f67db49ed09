"""A layer normalisation that an exporter took apart becomes one operator, and with it one kernel."""

from __future__ import annotations

import numpy as np
import onnx

from .graph import Array, Graph
from .products import WIDE, by_rows


def join_norms(graph: Graph) -> tuple[Graph, int]:
    """The graph with LayerNormalization wherever its parts stand, and how often they did."""
    found = graph.copy()
    made = [one for node in graph.nodes if (one := _norm(graph, found, node)) is not None]
    replaced = {one.output[0]: one for one in made}
    return found.tidied(replaced.get(node.output[0], node) for node in graph.nodes), len(made)


def _norm(graph: Graph, to: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """A node for `to` in the place of a Div of a centred value by its deviation, with what follows."""
    if node.op_type != "Div" or graph.types[node.output[0]].elem not in WIDE:
        return None
    made = graph.makers
    centred, deviation = (made.get(name) for name in node.input)
    if centred is None or centred.op_type != "Sub" or deviation is None or deviation.op_type != "Sqrt":
        return None
    given, mean = centred.input
    shifted = made.get(deviation.input[0])
    if _meant(graph, made.get(mean)) != given or shifted is None or shifted.op_type != "Add":
        return None
    variance, epsilon = shifted.input
    if variance in graph.constants:
        variance, epsilon = epsilon, variance
    square = made.get(_meant(graph, made.get(variance)))
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


def _meant(graph: Graph, node: onnx.NodeProto | None) -> str:
    """The value whose mean along rows a node is, as its shape tells; empty where it is something else."""
    if node is None or node.op_type != "ReduceMean":
        return ""
    along = graph.shape(node.output[0]) == (*graph.shape(node.input[0])[:-1], 1)
    return str(node.input[0]) if along else ""


def _step(graph: Graph, op: str, value: str, neutral: Array) -> tuple[str, Array]:
    """What comes of a value and the constant that is next done to its rows; the value where there is none."""
    reader = graph.only(value)
    constant = by_rows(graph, reader, op, value) if reader is not None else None
    if reader is None or constant is None:
        return value, neutral
    return str(reader.output[0]), graph.constants[constant].reshape(-1)
