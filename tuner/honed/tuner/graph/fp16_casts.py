"""Converts a float32 graph to fp16: chooses operators that stay in float32, and places the casts.

An operator is named by the value it makes. Graphs are normalised ones: of the core set, one output a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

Array = NDArray[Any]
_SINGLE = TensorProto.FLOAT
# Operators that lose most in half precision: long sums, and functions whose argument or result is large. They
# stay in float32 when a float32 model is computed in fp16, as in the mixed precision of cases like
# LightGlue's.
_USUALLY_KEPT = frozenset(
    {"Softmax", "LogSoftmax", "LayerNormalization", "ReduceSum", "ReduceMean", "ReduceProd", "AveragePool"}
    | {"Exp", "Log", "Pow", "Sin", "Cos", "Tan"}
)
# Sums of products: their operands may be of fp16 while they are added up in float32.
PRODUCTS = frozenset({"MatMul", "Conv"})
# Operators that return values unchanged, or none of floats: their type is that of their operands.
_FOLLOWING = frozenset(
    {"Identity", "Reshape", "Transpose", "Expand", "Concat", "Slice", "Pad", "Gather", "Where"}
    | {"Relu", "Abs", "Neg", "Max", "Min", "MaxPool", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "IsNaN"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Scan"}
)
BIT_CAST = "BitCast"  # An operator whose floats have as many bits as in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemptions:
    """The exemptions of a graph in fp16: operators in float32, and products of halves added up in float32."""

    single: frozenset[str]
    wide: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """The values and nodes of a graph in fp16 that are in float32."""

    values: frozenset[str]
    nodes: frozenset[str]


def singles(graph: onnx.GraphProto) -> frozenset[str]:
    """Return every value and constant that is of float32."""
    known = (*graph.input, *graph.output, *graph.value_info)
    return frozenset(
        {i.name for i in known if i.type.tensor_type.elem_type == _SINGLE}
        | {t.name for t in graph.initializer if t.data_type == _SINGLE}
    )


def operators(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes that round in fp16, in order: those that `Exemptions` may name."""
    single = singles(graph)
    return [n for n in graph.node if n.output[0] in single and not _follows(n, single)]


def usually(graph: onnx.GraphProto) -> Exemptions:
    """Return the operators that stay in float32 unless the needs of a model were measured."""
    return Exemptions(single=frozenset(n.output[0] for n in operators(graph) if n.op_type in _USUALLY_KEPT))


def assign_types(graph: onnx.GraphProto, keep: Exemptions) -> Typed:
    """Return what is in float32: the operators kept, what follows from their values, and inputs they read."""
    single = singles(graph)
    constants = {t.name for t in graph.initializer}
    wanted: set[str] = set()
    for node in reversed(graph.node):
        result = node.output[0]
        if result in keep.single or node.op_type == BIT_CAST or (result in wanted and _follows(node, single)):
            wanted.update(node.input)
    values = {i.name for i in graph.input if i.name in wanted} & single
    nodes: set[str] = set()
    for node in graph.node:
        given = [name for name in node.input if name in single and name not in constants]
        follows = _follows(node, single) and bool(given) and all(name in values for name in given)
        if follows or node.op_type == BIT_CAST or node.output[0] in keep.single:
            nodes.add(node.output[0])
            values |= {node.output[0]} & single
    return Typed(values=frozenset(values), nodes=frozenset(nodes))


def put_casts(graph: onnx.GraphProto, keep: Exemptions) -> frozenset[str]:
    """Put casts (in place) between fp16 and float32; return the values that are to stay in float32.

    All values still have float32. A product of `keep.wide` gives float32, which the next node converts to
    fp16.
    """
    return _Casts(graph, keep).put()


class _Casts:
    """The graph during the rewrite."""

    def __init__(self, graph: onnx.GraphProto, keep: Exemptions) -> None:
        self._graph = graph
        self._wide = keep.wide
        self._single = singles(graph)
        self._typed = assign_types(graph, keep)
        self._constants = {t.name: t for t in graph.initializer}
        self._known = {i.name: i for i in (*graph.input, *graph.output, *graph.value_info)}
        self._made: set[str] = set()
        self._kept = set(self._typed.values)

    def put(self) -> frozenset[str]:
        nodes = [new for node in self._graph.node for new in self._rewrite(node)]
        ordered = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del self._graph.node[:]
        self._graph.node.extend(ordered)
        return frozenset(self._kept)

    def _rewrite(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        result = node.output[0]
        in_single = result in self._typed.nodes
        for index, name in enumerate(node.input):
            if name in self._single and (name in self._typed.values) != in_single:
                other = f"{name}/fp32" if in_single else f"{name}/fp16"
                if other not in self._made:
                    yield from self._other(name, other, in_single)
                node.input[index] = other
        if result in self._wide and not in_single:
            node.output[0] = f"{result}/fp32"
            self._describe(node.output[0], like=result, in_single=True)
            yield node
            yield _cast(node.output[0], result)
        else:
            yield node

    def _other(self, name: str, other: str, in_single: bool) -> Iterator[onnx.NodeProto]:
        """Make the counterpart of a value in the other type."""
        if name in self._constants:
            self._graph.initializer.append(self._constants[name])
            self._graph.initializer[-1].name = other
            self._made.add(other)
            self._kept.add(other)
        else:
            self._describe(other, like=name, in_single=in_single)
            yield _cast(name, other)

    def _describe(self, name: str, *, like: str, in_single: bool) -> None:
        self._graph.value_info.append(self._known[like])
        self._graph.value_info[-1].name = name
        self._made.add(name)
        if in_single:
            self._kept.add(name)


def saturate(array: Array, to: type[np.floating[Any]]) -> Array:
    """Return the array in the type `to`, with finite values kept finite.

    This keeps masks of -1e9 usable in fp16.
    """
    limits = np.finfo(to)
    if np.finfo(array.dtype).max > limits.max:
        bounded = np.clip(array, array.dtype.type(limits.min), array.dtype.type(limits.max))
        array = np.where(np.isfinite(array), bounded, array)
    return np.ascontiguousarray(array.astype(to)).reshape(array.shape)


def _cast(source: str, target: str) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{target}/Cast", to=_SINGLE)


def _follows(node: onnx.NodeProto, single: frozenset[str]) -> bool:
    """Return whether a node's result has the type of its floats; so do casts that make none."""
    return node.op_type in _FOLLOWING or (node.op_type == "Cast" and node.output[0] not in single)
