"""Products with constant weights, as passes match them, and the passes that join and reorder such products.

Products of one value become one product, whose columns are sliced. Where a product is of two concatenated
values and one of them has a sibling, it first becomes a sum of two products. Columns of weights are put in
the order in which their results are sliced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import onnx

from .graph import Array, Graph, Replaced, Shape, TensorType, axis_of, perm_of

# Types in which constants are computed again
WIDE = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE})


@dataclass(frozen=True, slots=True)
class Product:
    """The product of `source` and a constant `weight` [k, n], plus a constant `bias` [n] if there is one.

    `value` is its result: that of `addition` where there is a bias, else of `node`.
    """

    node: onnx.NodeProto
    addition: onnx.NodeProto | None
    source: str
    weight: str
    bias: str | None

    @property
    def value(self) -> str:
        """The name of the result of the product, with its bias."""
        return str((self.addition or self.node).output[0])


def product(graph: Graph, node: onnx.NodeProto) -> Product | None:
    """Return a MatMul as a product, with the bias that is added to it alone.

    Returns None where the node is no product with a constant.
    """
    if node.op_type != "MatMul" or node.input[1] not in graph.constants:
        return None
    given, weight = node.input
    if graph.types[weight].elem not in WIDE or len(graph.shape(weight)) != 2 or len(graph.shape(given)) < 2:
        return None
    addition = graph.only(node.output[0])
    bias = by_rows(graph, addition, "Add", node.output[0]) if addition is not None else None
    return Product(node, addition if bias else None, given, weight, bias)


def by_rows(graph: Graph, node: onnx.NodeProto, op: str, value: str) -> str | None:
    """Return the constant that an Add or Mul adds to each row of a value, or multiplies it by."""
    if node.op_type != op or node.input[0] == node.input[1]:
        return None
    other = node.input[1] if node.input[0] == value else node.input[0]
    columns = graph.shape(value)[-1]
    if other not in graph.constants or graph.types[node.output[0]] != graph.types[value]:
        return None
    return other if graph.constants[other].size == columns == graph.shape(other)[-1:][0] else None


def exact(array: Array, like: Array) -> Array | None:
    """Return constants computed in float64 in the type of others; None where that type cannot hold them."""
    with np.errstate(over="ignore"):
        found: Array = array.astype(like.dtype)
    return found if np.isfinite(found).all() else None


def slice_first(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with slices moved before transposes, and how many transposes were concerned.

    Exporters write the queries, keys and values of an attention as one product, whose columns are split into
    axes, transposed and sliced along the last of them. Where slices come first, each is followed by its own
    transpose, which is fused into what reads it.
    """
    found, moved = graph.copy(), 0
    replaced: Replaced = {}
    for node in graph.nodes:
        slices = graph.uses(node.output[0])
        if node.op_type == "Transpose" and len(slices) > 1 and all(s.op_type == "Slice" for s in slices):
            replaced |= {s.output[0]: _slice_before_transpose(found, node, s) for s in slices}
            moved += 1
    return found.replacing(replaced), moved


def _slice_before_transpose(
    graph: Graph, transpose: onnx.NodeProto, node: onnx.NodeProto
) -> list[onnx.NodeProto]:
    """Return a Slice of a Transpose's input, and a Transpose of the result."""
    perm = perm_of(transpose)
    axes = np.array([perm[axis] for axis in graph.numbers(node.input[3])], np.int64)
    kind = graph.types[node.output[0]]
    before = TensorType(kind.elem, tuple(kind.shape[perm.index(axis)] for axis in range(len(perm))))
    name = graph.unique(f"{node.output[0]}/first")
    starts, ends, steps = (node.input[i] for i in (1, 2, 4))
    inputs = [transpose.input[0], starts, ends, graph.constant(axes, f"{name}/axes"), steps]
    return [
        graph.node("Slice", inputs, name, before),
        graph.node("Transpose", [name], node.output[0], kind, perm=perm),
    ]


@dataclass(frozen=True, slots=True)
class _Split:
    """A product whose columns are split into axes of `extents`, and sliced along one of them."""

    product: Product
    reshape: onnx.NodeProto
    slices: Sequence[onnx.NodeProto]
    extents: Shape
    along: int


def permute_columns(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with columns of weights in the order of slices, and how many products changed.

    Slices that would read every third column then read neighbours.
    """
    found = graph.copy()
    replaced: Replaced = {}
    splits = [split for node in graph.nodes if (split := _split(graph, node)) is not None]
    for split in splits:
        replaced |= _permute(found, split)
    return found.replacing(replaced), len(splits)


def _split(graph: Graph, node: onnx.NodeProto) -> _Split | None:
    made = product(graph, node)
    reshape = graph.only(made.value) if made is not None else None
    if made is None or reshape is None or reshape.op_type != "Reshape":
        return None
    rows, shape = graph.shape(made.value)[:-1], graph.shape(reshape.output[0])
    slices = graph.uses(reshape.output[0])
    if shape[: len(rows)] != rows or not slices or any(s.op_type != "Slice" for s in slices):
        return None
    axes = {tuple(graph.numbers(s.input[3])) for s in slices}
    axis = min(axes)[0]
    single = all(graph.shape(s.output[0])[axis] == 1 for s in slices)
    if len(axes) > 1 or len(min(axes)) > 1 or axis <= len(rows) or not single:
        return None
    return _Split(made, reshape, slices, shape[len(rows) :], axis - len(rows))


def _permute(graph: Graph, split: _Split) -> Replaced:
    """Return the replacements of the product, its bias and the slices, by their values."""
    made, width = split.product, math.prod(split.extents) // split.extents[split.along]
    node = _with_columns(graph, made.node, made.weight, split)
    replaced = {made.node.output[0]: [node]}
    if made.addition is not None and made.bias is not None:
        replaced[made.value] = [_with_columns(graph, made.addition, made.bias, split)]
    for one in split.slices:
        value, start = one.output[0], graph.numbers(one.input[1])[0] % split.extents[split.along]
        name = graph.unique(f"{value}/columns")
        axis = len(graph.shape(made.value)) - 1
        taken = graph.slice(made.value, name, axis, start * width, (start + 1) * width)
        replaced[value] = [taken, graph.reshape(name, value, graph.shape(value))]
    return replaced


def _with_columns(graph: Graph, node: onnx.NodeProto, constant: str, split: _Split) -> onnx.NodeProto:
    """Return a node that reads a constant with permuted columns."""
    array = graph.constants[constant]
    lead = array.shape[:-1]
    parts = np.moveaxis(array.reshape(*lead, *split.extents), len(lead) + split.along, len(lead))
    permuted = np.ascontiguousarray(parts).reshape(array.shape)
    name = graph.constant(permuted, f"{constant}/permuted")
    copy = deepcopy(node)
    copy.input[list(copy.input).index(constant)] = name
    return copy


def split_parts(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with products of joined values split into sums, and how many concatenations are gone.

    A product of two joined values is split where one of them can join a sibling: a feed-forward network reads
    the result of an attention beside its input, and the attention's queries, keys and values are products of
    that input as well. The sum is computed with the product, so the copy is saved.
    """
    found = graph.copy()
    products = [one for node in graph.nodes if (one := product(graph, node)) is not None]
    siblings = {(one.source, one.bias is not None) for one in products if _is_moved(graph, one)}
    replaced: Replaced = {}
    split = 0
    for one in products:
        joined = graph.makers.get(one.source)
        if joined is None or not _joins_rows(graph, joined) or graph.only(one.source) is None:
            continue
        kept = [n for n, value in enumerate(joined.input) if (value, one.bias is not None) in siblings]
        if kept:
            replaced |= {one.node.output[0]: []} | {
                one.value: _sum_products(found, one, list(joined.input), kept[0])
            }
            split += 1
    return found.replacing(replaced), split


def _joins_rows(graph: Graph, node: onnx.NodeProto) -> bool:
    """Return whether two different values are joined along the last axis."""
    if node.op_type != "Concat" or len(node.input) != 2 or node.input[0] == node.input[1]:
        return False
    rank = len(graph.shape(node.output[0]))
    return axis_of(node, rank) == rank - 1


def _sum_products(graph: Graph, one: Product, parts: list[str], sibling: int) -> list[onnx.NodeProto]:
    """Return the nodes that replace a product of two parts; the bias goes to the part that has a sibling."""
    kind, weight = graph.types[one.value], graph.constants[one.weight]
    border = graph.shape(parts[0])[-1]
    made: list[onnx.NodeProto] = []
    terms: list[str] = []
    for part, block in zip(parts, (weight[:border], weight[border:]), strict=True):
        constant = graph.constant(block, f"{one.weight}/part")
        terms.append(graph.unique(f"{one.node.output[0]}/part"))
        made.append(graph.node("MatMul", [part, constant], terms[-1], kind))
    if one.bias is not None:
        biased = graph.unique(f"{one.value}/part")
        made.append(graph.node("Add", [terms[sibling], one.bias], biased, kind))
        terms[sibling] = biased
    return [*made, graph.node("Add", [terms[1 - sibling], terms[sibling]], one.value, kind)]


_MOVING = frozenset({"Transpose", "Slice", "Concat", "Pad"})


def combine_parallel_matmuls(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with products of one value combined, whose columns are split, and how many are gone.

    Products are combined only where each of their readers moves its values anyway (queries, keys and values
    split into heads) or adds them to a product of another value: the slice is fused into the reader, so each
    product but one saves a launch. Otherwise the slice would be a copy instead.
    """
    found = graph.copy()
    families: dict[tuple[str, bool], list[Product]] = {}
    for node in graph.nodes:
        one = product(graph, node)
        if one is not None and _is_moved(graph, one):
            families.setdefault((one.source, one.bias is not None), []).append(one)
    replaced: Replaced = {}
    gone = 0
    for family in families.values():
        if len(family) > 1:
            replaced |= _combine(found, family)
            gone += len(family) - 1
    return found.replacing(replaced), gone


def _is_moved(graph: Graph, one: Product) -> bool:
    """Return whether a product is only moved, with whatever shape, or added to another product."""
    readers = graph.uses(one.value)
    if len(readers) == 1 and readers[0].op_type == "Add":
        return _is_added_to_product(graph, readers[0], one)
    while len(readers) == 1 and readers[0].op_type == "Reshape":
        readers = graph.uses(readers[0].output[0])
    return bool(readers) and all(reader.op_type in _MOVING for reader in readers)


def _is_added_to_product(graph: Graph, node: onnx.NodeProto, one: Product) -> bool:
    """Return whether an Add adds a product, in its own shape, to a MatMul's result for another value."""
    same = graph.types[node.output[0]] == graph.types[one.value]
    makers = [graph.makers[name] for name in node.input if name in graph.makers]
    return same and any(n.op_type == "MatMul" and n.input[0] != one.source for n in makers)


def _combine(graph: Graph, family: list[Product]) -> Replaced:
    """Return the replacements of the first product and of each value."""
    first = family[0]
    rows = graph.shape(first.value)[:-1]
    widths = [graph.shape(one.weight)[1] for one in family]
    kind = TensorType(graph.types[first.value].elem, (*rows, sum(widths)))
    weights = np.concatenate([graph.constants[one.weight] for one in family], axis=1)
    weight = graph.constant(weights, f"{first.weight}/combined")
    name = graph.unique(f"{first.node.output[0]}/combined")
    new = [graph.node("MatMul", [first.source, weight], name, kind)]
    if first.bias is not None:
        parts = [graph.constants[one.bias].reshape(-1) for one in family if one.bias is not None]
        bias = graph.constant(np.concatenate(parts), f"{first.bias}/combined")
        whole = graph.unique(f"{first.value}/combined")
        new.append(graph.node("Add", [name, bias], whole, kind))
        name = whole
    replaced: Replaced = {}
    start = 0
    for one, width in zip(family, widths, strict=True):
        if one.addition is not None:
            replaced[one.node.output[0]] = []
        replaced |= _slice_columns(graph, name, one.value, slice(start, start + width))
        replaced[one.value] = [*new, *replaced.get(one.value, [])]
        new, start = [], start + width
    return replaced


def _slice_columns(graph: Graph, whole: str, value: str, columns: slice) -> Replaced:
    """Return slices of the combined product in the place of a value, or of the slices of its columns."""
    axis, readers = len(graph.shape(value)) - 1, graph.uses(value)
    bounds = [graph.bounds(reader) for reader in readers]
    if not readers or any(found is None or found[0] != axis for found in bounds):
        return {value: [graph.slice(whole, value, axis, columns.start, columns.stop)]}
    found = {}
    for reader in readers:
        start = columns.start + graph.numbers(reader.input[1])[0]
        end = start + graph.shape(reader.output[0])[-1]
        found[str(reader.output[0])] = [graph.slice(whole, reader.output[0], axis, start, end)]
    return found
