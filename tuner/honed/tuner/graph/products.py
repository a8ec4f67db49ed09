"""Products with constant weights, as passes match them: what is multiplied, weights, bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from .graph import Array, Graph

WIDE = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE})  # that constants are computed anew in


@dataclass(frozen=True, slots=True)
class GraphUses:
    """What reads each value of a graph."""

    users: dict[str, list[onnx.NodeProto]]
    outputs: frozenset[str]

    @classmethod
    def of(cls, graph: Graph) -> GraphUses:
        """Those of a graph as it is."""
        return cls(graph.users(), frozenset(graph.outputs))

    def only(self, value: str) -> onnx.NodeProto | None:
        """The one node that reads a value, where there is one and the value is no output."""
        found = self.users.get(value, [])
        return found[0] if len(found) == 1 and value not in self.outputs else None

    def all(self, value: str) -> list[onnx.NodeProto]:
        """The nodes that read a value, none where it is an output as well."""
        return [] if value in self.outputs else self.users.get(value, [])


@dataclass(frozen=True, slots=True)
class Product:
    """`given` times the constant `weight` [k, n], plus the constant `bias` [n] where there is one.

    `value` is what it makes: of `addition` where there is a bias, else of `node`.
    """

    node: onnx.NodeProto
    addition: onnx.NodeProto | None
    given: str
    weight: str
    bias: str | None

    @property
    def value(self) -> str:
        """What the product, with its bias, is."""
        return str((self.addition or self.node).output[0])


def product(graph: Graph, node: onnx.NodeProto, uses: GraphUses) -> Product | None:
    """The product that a MatMul is, with the bias that is added to it alone; None where it is no such one."""
    if node.op_type != "MatMul" or node.input[1] not in graph.constants:
        return None
    given, weight = node.input
    if graph.types[weight].elem not in WIDE or len(graph.shape(weight)) != 2 or len(graph.shape(given)) < 2:
        return None
    addition = uses.only(node.output[0])
    bias = by_rows(graph, addition, "Add", node.output[0]) if addition is not None else None
    return Product(node, addition if bias else None, given, weight, bias)


def by_rows(graph: Graph, node: onnx.NodeProto, op: str, value: str) -> str | None:
    """The constant that an Add or Mul adds to each row of a value, or multiplies it by."""
    if node.op_type != op or node.input[0] == node.input[1]:
        return None
    other = node.input[1] if node.input[0] == value else node.input[0]
    columns = graph.shape(value)[-1]
    if other not in graph.constants or graph.types[node.output[0]] != graph.types[value]:
        return None
    return other if graph.constants[other].size == columns == graph.shape(other)[-1:][0] else None


def exact(array: Array, like: Array) -> Array | None:
    """Constants computed in float64, in the type of others; None where that type does not hold them."""
    with np.errstate(over="ignore"):
        found: Array = array.astype(like.dtype)
    return found if np.isfinite(found).all() else None
