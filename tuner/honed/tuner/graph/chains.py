"""A product of a product of constants is one product, where that costs no more multiplications.

The factors may stand a concatenation apart, as the output projection of an attention does from the
feed-forward network that reads it beside what the attention was given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from .graph import Array, Graph, TensorType, axis_of, copied
from .products import GraphUses, Product, exact, product


@dataclass(frozen=True, slots=True)
class _Part:
    """Of what a product is given: the rows of its weight that it meets, and the product it is, if any."""

    value: str
    rows: slice
    inner: Product | None


def fold_chains(graph: Graph) -> tuple[Graph, int]:
    """The graph without products that others can take in, and how many those were."""
    folder = _ChainFolder(graph.copy())
    while folder.fold():
        pass
    return folder.graph, folder.folded


@dataclass(slots=True)
class _ChainFolder:
    graph: Graph
    folded: int = 0

    def fold(self) -> bool:
        """Fold into every product that takes some in; whether there was any."""
        uses, producers = GraphUses.of(self.graph), self.graph.producers()
        changed: set[str] = set()
        replaced: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.nodes:
            outer = product(self.graph, node, uses)
            if outer is None:
                continue
            parts = self._parts(outer, uses, producers)
            inner = [part.inner.node.output[0] for part in parts if part.inner is not None]
            if not inner or not changed.isdisjoint([*inner, node.output[0]]):
                continue
            if new := self._replacement(outer, parts):
                replaced |= {outer.value: [], node.output[0]: new}
                changed |= {*inner, node.output[0]}
                self.folded += len(inner)
        self.graph = self.graph.replacing(replaced)
        return bool(changed)

    def _parts(self, outer: Product, uses: GraphUses, producers: dict[str, onnx.NodeProto]) -> list[_Part]:
        made = producers.get(outer.given)
        rank = len(self.graph.shape(outer.given))
        joined = (
            made is not None
            and made.op_type == "Concat"
            and axis_of(made, rank) == rank - 1
            and uses.only(outer.given) is not None
        )
        parts, row = [], 0
        for value in made.input if joined and made is not None else (outer.given,):
            rows = self.graph.shape(value)[-1]
            inner = self._inner(value, self.graph.shape(outer.weight)[1], uses, producers)
            if inner is not None and inner.bias is not None and outer.bias is None:
                inner = None
            parts.append(_Part(value, slice(row, row + rows), inner))
            row += rows
        return parts

    def _inner(
        self, value: str, columns: int, uses: GraphUses, producers: dict[str, onnx.NodeProto]
    ) -> Product | None:
        """The product that a value is, where only one node reads it and taking it in costs no more."""
        made = producers.get(value)
        if made is not None and made.op_type == "Add":
            made = next((producers[name] for name in made.input if name in producers), None)
        found = product(self.graph, made, uses) if made is not None else None
        if found is None or found.value != value or uses.only(value) is None:
            return None
        k, n = self.graph.shape(found.weight)
        return found if k * columns <= k * n + n * columns else None

    def _replacement(self, outer: Product, parts: list[_Part]) -> list[onnx.NodeProto]:
        """The product with the weights of some parts taken in; none where its type does not hold them."""
        constants = self._constants(outer, parts)
        if constants is None:
            return []
        new = [copied(outer.node)]
        new[0].input[1] = constants[0]
        given = [part.inner.given if part.inner else part.value for part in parts]
        if len(parts) > 1:
            new.insert(0, self._joined(outer.given, given))
            given = [new[0].output[0]]
        new[-1].input[0] = given[0]
        if outer.addition is not None and outer.bias is not None:
            new.append(copied(outer.addition))
            new[-1].input[list(new[-1].input).index(outer.bias)] = constants[1]
        return new

    def _joined(self, like: str, given: list[str]) -> onnx.NodeProto:
        """A concatenation along the last axis in the place of another."""
        shape = self.graph.shape(like)
        kind = TensorType(
            self.graph.types[like].elem, (*shape[:-1], sum(self.graph.shape(n)[-1] for n in given))
        )
        return self.graph.node(
            "Concat", given, self.graph.unique(f"{like}/folded"), kind, axis=len(shape) - 1
        )

    def _constants(self, outer: Product, parts: list[_Part]) -> tuple[str, str] | None:
        """The names of weight and bias of a product that takes parts in; "" for no bias."""
        whole = self.graph.constants[outer.weight]
        blocks = [whole[part.rows].astype(np.float64) for part in parts]
        weight = exact(np.concatenate([self._block(p, b) for p, b in zip(parts, blocks, strict=True)]), whole)
        if weight is None:
            return None
        if outer.bias is None:
            return self.graph.constant(weight, f"{outer.weight}/folded"), ""
        bias = self.graph.constants[outer.bias].astype(np.float64)
        for part, block in zip(parts, blocks, strict=True):
            if part.inner is not None and part.inner.bias is not None:
                bias = bias + self.graph.constants[part.inner.bias].reshape(-1).astype(np.float64) @ block
        added = exact(bias, whole)
        if added is None:
            return None
        return (
            self.graph.constant(weight, f"{outer.weight}/folded"),
            self.graph.constant(added, f"{outer.bias}/folded"),
        )

    def _block(self, part: _Part, block: Array) -> Array:
        """The rows of a weight that meet a part, once it is taken in."""
        if part.inner is None:
            return block
        found: Array = self.graph.constants[part.inner.weight].astype(np.float64) @ block
        return found
