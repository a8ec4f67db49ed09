"""Passes that fold constants and zeros into the products and convolutions beside them.

A product of a product of constants is one product, where that costs no more multiplications. A concatenation
may lie between the factors, as between the output projection of an attention and the feed-forward network
that reads it beside the attention's input. Factors and offsets after a product or convolution, as of a
normalisation with known statistics or a scaled projection, are folded into its weights and bias. Zeros around
an image for convolutions alone become the convolutions' own padding.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from .graph import Array, Graph, Replaced, axis_of
from .products import WIDE, Product, exact, product


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a product's operand, the weight's rows for it, and the product that makes it, if any."""

    value: str
    rows: slice
    inner: Product | None


def fold_chains(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with products folded into others, and how many were folded."""
    folded = 0
    while True:
        found, fewer = _fold_once(graph.copy())
        if not fewer:
            return graph, folded
        graph, folded = found, folded + fewer


def _fold_once(graph: Graph) -> tuple[Graph, int]:
    """Fold into every product that takes some in, but into none that is folded itself; count those folded."""
    changed: set[str] = set()
    replaced: Replaced = {}
    folded = 0
    for node in graph.nodes:
        outer = product(graph, node)
        if outer is None:
            continue
        parts = _parts(graph, outer)
        inner = [part.inner.node.output[0] for part in parts if part.inner is not None]
        if not inner or not changed.isdisjoint([*inner, node.output[0]]):
            continue
        if new := _replacement(graph, outer, parts):
            replaced |= {outer.value: [], node.output[0]: new}
            changed |= {*inner, node.output[0]}
            folded += len(inner)
    return graph.replacing(replaced), folded


def _parts(graph: Graph, outer: Product) -> list[_Part]:
    made, rank = graph.makers.get(outer.source), len(graph.shape(outer.source))
    values = [outer.source]
    if made is not None and made.op_type == "Concat" and axis_of(made, rank) == rank - 1:
        values = list(made.input) if graph.only(outer.source) is not None else values
    parts, row = [], 0
    for value in values:
        rows = graph.shape(value)[-1]
        inner = _inner(graph, value, graph.shape(outer.weight)[1])
        if inner is not None and inner.bias is not None and outer.bias is None:
            inner = None
        parts.append(_Part(value, slice(row, row + rows), inner))
        row += rows
    return parts


def _inner(graph: Graph, value: str, columns: int) -> Product | None:
    """Return the product that makes a value, where only one node reads it and folding it costs no more."""
    made = graph.makers.get(value)
    if made is not None and made.op_type == "Add":
        made = next((graph.makers[name] for name in made.input if name in graph.makers), None)
    found = product(graph, made) if made is not None else None
    if found is None or found.value != value or graph.only(value) is None:
        return None
    k, n = graph.shape(found.weight)
    return found if k * columns <= k * n + n * columns else None


def _replacement(graph: Graph, outer: Product, parts: list[_Part]) -> list[onnx.NodeProto]:
    """Return the product with the weights of some parts folded in; none where its type cannot hold them."""
    constants = _constants(graph, outer, parts)
    if constants is None:
        return []
    new = [deepcopy(outer.node)]
    new[0].input[1] = constants[0]
    given = [part.inner.source if part.inner else part.value for part in parts]
    if len(parts) > 1:
        axis, like = len(graph.shape(outer.source)) - 1, outer.source
        kind = graph.types[like].along(axis, sum(graph.shape(name)[-1] for name in given))
        new.insert(0, graph.node("Concat", given, graph.unique(f"{like}/folded"), kind, axis=axis))
        given = [new[0].output[0]]
    new[-1].input[0] = given[0]
    if outer.addition is not None and outer.bias is not None:
        new.append(deepcopy(outer.addition))
        new[-1].input[list(new[-1].input).index(outer.bias)] = constants[1]
    return new


def _constants(graph: Graph, outer: Product, parts: list[_Part]) -> tuple[str, str] | None:
    """Return the names of weight and bias of a product with parts folded in; "" for no bias."""
    whole = graph.constants[outer.weight]
    blocks = [whole[part.rows].astype(np.float64) for part in parts]
    taken = [
        block if part.inner is None else graph.constants[part.inner.weight].astype(np.float64) @ block
        for part, block in zip(parts, blocks, strict=True)
    ]
    weight = exact(np.concatenate(taken), whole)
    if weight is None:
        return None
    if outer.bias is None:
        return graph.constant(weight, f"{outer.weight}/folded"), ""
    bias = graph.constants[outer.bias].astype(np.float64)
    for part, block in zip(parts, blocks, strict=True):
        if part.inner is not None and part.inner.bias is not None:
            bias = bias + graph.constants[part.inner.bias].reshape(-1).astype(np.float64) @ block
    added = exact(bias, whole)
    if added is None:
        return None
    return graph.constant(weight, f"{outer.weight}/folded"), graph.constant(added, f"{outer.bias}/folded")


# Limits of factors that are folded: others could make weights too small for their type.
_LEAST, _MOST = 2.0**-16, 2.0**16
_LEAST_SCALE = 2.0**-4  # Factor by which a value that is not constant may become smaller


@dataclass(frozen=True, slots=True)
class _Linear:
    """A MatMul or Conv and the nodes after it: each column or channel times a factor, plus an offset."""

    root: onnx.NodeProto
    steps: tuple[onnx.NodeProto, ...]
    factor: Array
    offset: Array

    @property
    def value(self) -> str:
        """The output of the last step."""
        return str((self.root, *self.steps)[-1].output[0])


def fold_factors(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with factors and offsets folded into weights, and how many nodes fewer it has."""
    found = graph.copy()
    linear: dict[str, _Linear] = {}
    for node in graph.nodes:
        made = _root(graph, node) or _extend(graph, node, linear)
        if made is not None:
            linear[made.value] = made
    whole = {one.root.output[0]: one for one in linear.values()}  # The last ones have the most steps
    replaced: Replaced = {}
    fewer = 0
    for name, one in whole.items():
        new = _fold(found, one) if one.steps else []
        if new and len(new) <= len(one.steps):
            replaced |= {step.output[0]: [] for step in one.steps} | {name: new}
            fewer += 1 + len(one.steps) - len(new)
    for node in graph.nodes:
        if new := _with_one_factor(graph, found, node, replaced):
            replaced[node.output[0]] = new
            fewer += 1
    return found.replacing(replaced), fewer


def _with_one_factor(
    graph: Graph, to: Graph, node: onnx.NodeProto, replaced: Replaced
) -> list[onnx.NodeProto]:
    """Return a product of two scaled values with the first scaled by both factors; none for other nodes.

    The second, such as the keys of a cache, is then read in place.
    """
    if node.op_type != "MatMul":
        return []
    scaled = [found for name in node.input if (found := _find_factor(graph, name)) is not None]
    if len(scaled) < len(node.input) or not replaced.keys().isdisjoint(node.input):
        return []
    (first, one), (second, other) = scaled
    if not 1 >= abs(other) >= _LEAST_SCALE or graph.only(node.input[1]) is None:
        return []
    kind, value = graph.types[node.input[0]], to.unique(f"{node.output[0]}/scaled")
    factor = np.array(one * other, helper.tensor_dtype_to_np_dtype(kind.elem))
    scale = to.constant(factor, f"{value}/factor")
    result = str(node.output[0])
    return [
        to.node("Mul", [first, scale], value, kind),
        to.node("MatMul", [value, second], result, graph.types[result]),
    ]


def _find_factor(graph: Graph, value: str) -> tuple[str, float] | None:
    """Return the value that `value` is a multiple of, and the constant factor.

    None where it is no such value.
    """
    made = graph.makers.get(value)
    if made is None or made.op_type != "Mul":
        return None
    for given, by in (made.input, reversed(made.input)):
        constant = graph.constants.get(by)
        if constant is not None and constant.size == 1 and graph.types[given] == graph.types[value]:
            return str(given), float(constant.item())
    return None


def _root(graph: Graph, node: onnx.NodeProto) -> _Linear | None:
    """Return a MatMul or Conv with a constant weight and no bias as linear; None for other nodes."""
    if node.op_type not in ("MatMul", "Conv") or node.input[1] not in graph.constants:
        return None
    ranks = [len(graph.shape(name)) for name in node.input[:2]]
    plain = len(node.input) == 2 and (node.op_type == "Conv" or (ranks[1] == 2 and ranks[0] >= 2))
    if not plain or graph.types[node.input[1]].elem not in WIDE:
        return None
    columns = graph.shape(node.input[1])[0 if node.op_type == "Conv" else 1]
    return _Linear(node, (), np.ones(columns), np.zeros(columns))


def _extend(graph: Graph, node: onnx.NodeProto, linear: dict[str, _Linear]) -> _Linear | None:
    """Return a linear value extended by a node that combines it with a constant, or None.

    Only this node may read the value.
    """
    if node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    at = 0 if node.input[0] in linear else 1
    value, other = node.input[at], node.input[1 - at]
    if value not in linear or other not in graph.constants or graph.only(value) is None:
        return None
    if (at == 1 and node.op_type in ("Sub", "Div")) or graph.types[value] != graph.types[node.output[0]]:
        return None
    before = linear[value]
    constant = _by_column(graph, before.root, other, graph.shape(value))
    if constant is None:
        return None
    by, more = np.ones_like(constant), np.zeros_like(constant)
    if node.op_type in ("Add", "Sub"):
        more = constant if node.op_type == "Add" else -constant
    elif np.all((np.abs(constant) >= _LEAST) & (np.abs(constant) <= _MOST)):
        by = constant if node.op_type == "Mul" else 1 / constant
    else:
        return None
    return _Linear(before.root, (*before.steps, node), before.factor * by, before.offset * by + more)


def _by_column(graph: Graph, root: onnx.NodeProto, name: str, shape: tuple[int, ...]) -> Array | None:
    """Return a constant as float64, one element for each column or channel.

    Returns None where the constant differs along other axes.
    """
    array = graph.constants[name]
    axis = len(shape) - 1 if root.op_type == "MatMul" else 1
    aligned = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if any(extent != 1 for at, extent in enumerate(aligned.shape) if at != axis):
        return None
    found: Array = np.broadcast_to(aligned.reshape(-1).astype(np.float64), (shape[axis],))
    return found if np.isfinite(found).all() else None


def _fold(graph: Graph, one: _Linear) -> list[onnx.NodeProto]:
    """Return the product or convolution with other weights, and an Add where there is a bias.

    Returns no nodes where the type of the weights cannot hold the new ones.
    """
    weight = graph.constants[one.root.input[1]]
    factor, offset, ones = one.factor, one.offset, (1,) * (weight.ndim - 2)
    if one.root.op_type == "Conv":
        factor, offset = factor.reshape(-1, 1, *ones), offset.reshape(1, -1, *ones)
    scaled, bias = exact(weight * factor, weight), exact(offset, weight)
    if scaled is None or bias is None:
        return []
    root = deepcopy(one.root)
    if (factor != 1).any():
        root.input[1] = graph.constant(scaled, f"{one.root.input[1]}/scaled")
    if not offset.any():
        root.output[0] = root.name = one.value
        return [root]
    constant = graph.constant(bias, f"{one.value}/offset")
    return [root, graph.node("Add", [root.output[0], constant], one.value, graph.types[one.value])]


_KEPT = 2  # Axes that a convolution does not pad: images and channels


def fold_pads(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with Pads folded into convolutions, and how many were folded."""
    folded = {
        node.output[0]: widths
        for node in graph.nodes
        if node.op_type == "Pad" and (widths := _widths(graph, node)) is not None
    }
    nodes = [
        _padding(node, graph.makers[node.input[0]].input[0], folded[node.input[0]])
        if node.op_type == "Conv" and node.input[0] in folded
        else node
        for node in graph.nodes
    ]
    return graph.tidy(nodes), len(folded)


def _widths(graph: Graph, node: onnx.NodeProto) -> list[int] | None:
    """Return how much a Pad adds before and after each axis of an image.

    Returns None where the Pad is not for convolutions.
    """
    readers = graph.uses(node.output[0])
    image = all(one.op_type == "Conv" and one.input[1] != node.output[0] for one in readers)
    if not readers or not image or graph.constants[node.input[2]].any():
        return None
    amounts, rank = graph.numbers(node.input[1]), len(graph.shape(node.input[0]))
    before, behind = amounts[:rank], amounts[rank:]
    if any(before[:_KEPT]) or any(behind[:_KEPT]) or min(amounts) < 0:
        return None
    return [*before[_KEPT:], *behind[_KEPT:]]


def _padding(node: onnx.NodeProto, image: str, widths: list[int]) -> onnx.NodeProto:
    """Return the convolution with `widths` added to its padding, and with the unpadded image as its input."""
    made = deepcopy(node)
    made.input[0] = image
    (pads,) = (attribute for attribute in made.attribute if attribute.name == "pads")
    total = [own + more for own, more in zip(pads.ints, widths, strict=True)]
    pads.CopyFrom(helper.make_attribute("pads", total))
    return made
