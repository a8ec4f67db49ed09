"""Columns of constant weights put in the order in which their results are taken apart.

Exporters write the queries, keys and values of an attention as one product, whose columns are split into
axes, transposed and sliced along the last of them. Slices come first here, each followed by its own
transpose, which is fused into what reads it; and where they would take every third column, the columns are
permuted so that they take neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from .graph import Graph, Shape, TensorType, copied
from .products import GraphUses, Product, product


def slice_first(graph: Graph) -> tuple[Graph, int]:
    """The graph with slices before the transposes they stand behind, and how many transposes those were."""
    found, uses, moved = graph.copy(), GraphUses.of(graph), 0
    replaced: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        slices = uses.all(node.output[0])
        if node.op_type == "Transpose" and len(slices) > 1 and all(s.op_type == "Slice" for s in slices):
            replaced |= {s.output[0]: _turned(found, node, s) for s in slices}
            moved += 1
    if not moved:
        return graph, 0
    return found.replacing(replaced), moved


def _turned(graph: Graph, transpose: onnx.NodeProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """A Slice of what a Transpose is given, and the Transpose behind it."""
    perm = list(helper.get_node_attr_value(transpose, "perm"))
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
    """A product whose columns are split into axes of `extents`, and taken apart along one of them."""

    product: Product
    reshape: onnx.NodeProto
    slices: Sequence[onnx.NodeProto]
    extents: Shape
    along: int


def permute_columns(graph: Graph) -> tuple[Graph, int]:
    """The graph with weights whose columns are in the order of slices, and how many products those are of."""
    found, uses = graph.copy(), GraphUses.of(graph)
    replaced: dict[str, list[onnx.NodeProto]] = {}
    splits = [split for node in graph.nodes if (split := _split(graph, node, uses)) is not None]
    for split in splits:
        replaced |= _permuted(found, split)
    if not splits:
        return graph, 0
    return found.replacing(replaced), len(splits)


def _split(graph: Graph, node: onnx.NodeProto, uses: GraphUses) -> _Split | None:
    made = product(graph, node, uses)
    reshape = uses.only(made.value) if made is not None else None
    if made is None or reshape is None or reshape.op_type != "Reshape":
        return None
    rows, shape = graph.shape(made.value)[:-1], graph.shape(reshape.output[0])
    slices = uses.all(reshape.output[0])
    if shape[: len(rows)] != rows or not slices or any(s.op_type != "Slice" for s in slices):
        return None
    axes = {tuple(graph.numbers(s.input[3])) for s in slices}
    axis = min(axes)[0]
    single = all(graph.shape(s.output[0])[axis] == 1 for s in slices)
    if len(axes) > 1 or len(min(axes)) > 1 or axis <= len(rows) or not single:
        return None
    return _Split(made, reshape, slices, shape[len(rows) :], axis - len(rows))


def _permuted(graph: Graph, split: _Split) -> dict[str, list[onnx.NodeProto]]:
    """What takes the place of the product, its bias and the slices, by their values."""
    made, width = split.product, math.prod(split.extents) // split.extents[split.along]
    node = _with_columns(graph, made.node, made.weight, split)
    replaced = {made.node.output[0]: [node]}
    if made.addition is not None and made.bias is not None:
        replaced[made.value] = [_with_columns(graph, made.addition, made.bias, split)]
    for one in split.slices:
        start = graph.numbers(one.input[1])[0] % split.extents[split.along]
        name = graph.unique(f"{one.output[0]}/columns")
        axis = len(graph.shape(made.value)) - 1
        taken = graph.slice(made.value, name, axis, start * width, (start + 1) * width)
        replaced[one.output[0]] = [
            taken,
            graph.reshape(name, one.output[0], graph.shape(one.output[0])),
        ]
    return replaced


def _with_columns(graph: Graph, node: onnx.NodeProto, constant: str, split: _Split) -> onnx.NodeProto:
    """A node that reads a constant with permuted columns."""
    array = graph.constants[constant]
    lead = array.shape[:-1]
    parts = np.moveaxis(array.reshape(*lead, *split.extents), len(lead) + split.along, len(lead))
    permuted = np.ascontiguousarray(parts).reshape(array.shape)
    name = graph.constant(permuted, f"{constant}/permuted")
    copy = copied(node)
    copy.input[list(copy.input).index(constant)] = name
    return copy
