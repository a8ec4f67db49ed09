"""Defines the values along the edges while a graph is normalised, and the reasons to refuse nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from honed.onnxfile.reading import clean
from honed.protocol.errors import ModelRefused

Array = npt.NDArray[Any]
SHOWN_NODES = 3
# The reason to refuse an operator without any rule.
UNSUPPORTED = "the operator is not compiled"


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor: its name in the normalised graph, dtype, static shape, and its data where it is constant."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: Array | None = None

    @property
    def rank(self) -> int:
        """Number of the tensor's dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of the tensor's elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Return whether the elements are floating point (of any width)."""
        return self.dtype.kind == "f"

    def type_proto(self) -> onnx.TypeProto:
        """Return this type as ONNX writes it."""
        return helper.make_tensor_type_proto(elem_type(self.dtype), self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """An ONNX sequence whose length is known: it exists while compiling only."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class EmptyOptional:
    """An empty ONNX optional: it exists while compiling only."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The output of a refused node; nodes that need it cannot be judged beyond their name."""


Item = Value | Listing | EmptyOptional | Unknown


class NodeRefused(Exception):
    """Raised when one node cannot be compiled; the text says why, without naming the node."""


def elem_type(dtype: np.dtype[Any]) -> int:
    """Return ONNX's number for a NumPy dtype."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def numpy_dtype(elem: int) -> np.dtype[Any]:
    """Return NumPy's dtype for ONNX's number; raises NodeRefused where ONNX knows no such type."""
    try:
        found: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(elem))
    except KeyError:
        raise NodeRefused(f"element type number {elem} does not exist") from None
    return found


@dataclass(slots=True)
class Reasons:
    """The refusals of a whole graph, so that the user sees all of them at once."""

    general: list[str] = field(default_factory=list)
    _nodes: dict[tuple[str, str, int, str], list[str]] = field(default_factory=dict)

    def add(self, node: onnx.NodeProto, domain: str, opset: int, why: str) -> None:
        """Record that a node cannot be compiled."""
        name = clean(node.name or next((o for o in node.output if o), node.op_type), 80)
        names = self._nodes.setdefault((clean(node.op_type, 80), clean(domain, 80), opset, clean(why)), [])
        if name not in names:
            names.append(name)

    def count(self) -> int:
        """Return how many nodes and other reasons were recorded."""
        return len(self.general) + sum(map(len, self._nodes.values()))

    def whys(self) -> tuple[str, ...]:
        """Return one clause for each kind of node, without the nodes and without remedies."""
        return tuple(f"{op}: {why.partition('; ')[0]}" for op, _, _, why in self._nodes)

    def texts(self) -> tuple[str, ...]:
        """Return one sentence for each reason."""
        found = [clean(text) for text in self.general]
        for (op, domain, opset, why), names in self._nodes.items():
            listed = ", ".join(names[:SHOWN_NODES]) + (", ..." if len(names) > SHOWN_NODES else "")
            nodes = f"node {listed}" if len(names) == 1 else f"{len(names)} nodes: {listed}"
            found.append(f"{op} ({domain or 'ai.onnx'}, opset {opset}; {nodes}): {why}")
        return tuple(found)

    def check(self) -> None:
        """Raise ModelRefused where there are any reasons."""
        texts = self.texts()
        if len(texts) == 1:
            raise ModelRefused(f"the model cannot be compiled: {texts[0]}", texts)
        if texts:
            operators = ", ".join(dict.fromkeys(op for op, _, _, _ in self._nodes))
            named = f" (operators {operators})" if operators else ""
            raise ModelRefused(f"the model cannot be compiled, for {len(texts)} reasons{named}", texts)
