"""Factors and offsets behind a product or convolution of constant weights go into its weights and bias.

What is left of a normalisation with known statistics, or of a scaled projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from .graph import Array, Graph, copied
from .products import WIDE, GraphUses, exact

# Of factors that are folded: others could make weights too small for their type.
_LEAST, _MOST = 2.0**-16, 2.0**16


@dataclass(frozen=True, slots=True)
class _Step:
    """What is done to each column or channel: it is multiplied, and added to."""

    node: onnx.NodeProto
    factor: Array
    offset: Array


@dataclass(frozen=True, slots=True)
class _Linear:
    """A MatMul or Conv and the steps behind it."""

    root: onnx.NodeProto
    steps: tuple[_Step, ...]

    @property
    def value(self) -> str:
        """What comes of it all."""
        return str((self.steps[-1].node if self.steps else self.root).output[0])


def fold_factors(graph: Graph) -> tuple[Graph, int]:
    """The graph without such factors and offsets, and how many nodes fewer it has."""
    found, uses = graph.copy(), GraphUses.of(graph)
    linear: dict[str, _Linear] = {}
    for node in graph.nodes:
        made = _root(graph, node) or _followed(graph, node, linear, uses)
        if made is not None:
            linear[made.value] = made
    whole = {one.root.output[0]: one for one in linear.values()}  # with the most steps: they come last
    replaced: dict[str, list[onnx.NodeProto]] = {}
    fewer = 0
    for name, one in whole.items():
        new = _folded(found, one) if one.steps else []
        if new and len(new) <= len(one.steps):
            replaced |= {step.node.output[0]: [] for step in one.steps} | {name: new}
            fewer += 1 + len(one.steps) - len(new)
    if not fewer:
        return graph, 0
    return found.replacing(replaced), fewer


def _root(graph: Graph, node: onnx.NodeProto) -> _Linear | None:
    """A product with the columns, or a convolution with the channels, of one constant."""
    if node.op_type not in ("MatMul", "Conv") or node.input[1] not in graph.constants:
        return None
    ranks = [len(graph.shape(name)) for name in node.input[:2]]
    plain = len(node.input) == 2 and (node.op_type == "Conv" or (ranks[1] == 2 and ranks[0] >= 2))
    return _Linear(node, ()) if plain and graph.types[node.input[1]].elem in WIDE else None


def _followed(
    graph: Graph, node: onnx.NodeProto, linear: dict[str, _Linear], uses: GraphUses
) -> _Linear | None:
    """What a node makes of a value known to be linear that it alone reads, with a constant."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    at = 0 if node.input[0] in linear else 1
    value, other = node.input[at], node.input[1 - at]
    if value not in linear or other not in graph.constants or uses.only(value) is None:
        return None
    if (at == 1 and node.op_type in ("Sub", "Div")) or graph.types[value] != graph.types[node.output[0]]:
        return None
    before = linear[value]
    constant = _by_column(graph, before.root, other, graph.shape(value))
    if constant is None:
        return None
    one, none = np.ones_like(constant), np.zeros_like(constant)
    if node.op_type in ("Add", "Sub"):
        step = _Step(node, one, constant if node.op_type == "Add" else -constant)
    else:
        sizes = np.abs(constant)
        if not np.all((sizes >= _LEAST) & (sizes <= _MOST)):
            return None
        step = _Step(node, constant if node.op_type == "Mul" else 1 / constant, none)
    return _Linear(before.root, (*before.steps, step))


def _by_column(graph: Graph, root: onnx.NodeProto, name: str, shape: tuple[int, ...]) -> Array | None:
    """A constant as float64, one element for each column or channel; None where it differs along others."""
    array = graph.constants[name]
    axis = len(shape) - 1 if root.op_type == "MatMul" else 1
    aligned = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if any(extent != 1 for at, extent in enumerate(aligned.shape) if at != axis):
        return None
    found: Array = np.broadcast_to(aligned.reshape(-1).astype(np.float64), (shape[axis],))
    return found if np.isfinite(found).all() else None


def _folded(graph: Graph, one: _Linear) -> list[onnx.NodeProto]:
    """The product or convolution with other weights, and an Add where there is a bias.

    None of them where the type of the weights does not hold those.
    """
    weight = graph.constants[one.root.input[1]]
    total, added = np.ones_like(one.steps[0].factor), np.zeros_like(one.steps[0].factor)
    for step in one.steps:
        total, added = total * step.factor, added * step.factor + step.offset
    matmul = one.root.op_type == "MatMul"
    scaled = exact(weight * (total if matmul else total.reshape(-1, *(1,) * (weight.ndim - 1))), weight)
    bias = exact(added if matmul else added.reshape(1, -1, *(1,) * (weight.ndim - 2)), weight)
    if scaled is None or bias is None:
        return []
    root, biased = copied(one.root), bool(added.any())
    if (total != 1).any():
        root.input[1] = graph.constant(scaled, f"{one.root.input[1]}/scaled")
    if not biased:
        root.output[0] = root.name = one.value
        return [root]
    constant = graph.constant(bias, f"{one.value}/offset")
    return [root, graph.node("Add", [root.output[0], constant], one.value, graph.types[one.value])]
