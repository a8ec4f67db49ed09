"""Defines values along the edges, nodes with their inputs as rules read them, and reasons to refuse nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """A node: operator, the opset it is written in, resolved inputs, attributes as Python values."""

    op: str
    domain: str
    opset: int
    node: onnx.NodeProto
    inputs: tuple[Item | None, ...]
    attrs: dict[str, Any]

    def wants(self, index: int) -> bool:
        """Return whether output `index` is used."""
        return index < len(self.node.output) and bool(self.node.output[index])

    def x(self, index: int = 0) -> Value:
        """Return input `index`, a tensor that must be present."""
        found = self.opt(index)
        if found is None:
            raise NodeRefused(f"its input {index} is missing")
        return found

    def opt(self, index: int) -> Value | None:
        """Return input `index`, a tensor, or None where it is left out."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None or isinstance(found, Value):
            return found
        raise NodeRefused(f"its input {index} is a sequence or an optional, not a tensor")

    def listing(self) -> Listing:
        """Return input 0, a sequence."""
        found = self.inputs[0] if self.inputs else None
        if isinstance(found, Listing):
            return found
        raise NodeRefused("its input 0 is not a sequence known when compiling")

    def const(self, index: int, what: str) -> Array:
        """Return the data of input `index`, which must be constant."""
        found = self.x(index)
        if found.data is None:
            raise NodeRefused(f"its {what} (input {index}) is computed at run time; it must be a constant")
        return found.data

    def opt_const(self, index: int, what: str) -> Array | None:
        """Return the data of constant input `index`, or None where it is left out."""
        return None if self.opt(index) is None else self.const(index, what)

    def numbers(self, index: int, what: str) -> list[int]:
        """Return the data of input `index`, which must be constant, as integers."""
        return [int(v) for v in self.const(index, what).reshape(-1)]

    def opt_numbers(self, index: int, what: str) -> list[int] | None:
        """Return the data of constant input `index` as integers, or None where it is left out."""
        return None if self.opt(index) is None else self.numbers(index, what)

    def tensors(self) -> list[Value]:
        """Return all inputs, each a tensor."""
        return [self.x(i) for i in range(len(self.inputs))]

    def integer(self, name: str, default: int = 0) -> int:
        """Return an integer attribute, or its default."""
        return int(self.attrs.get(name, default))

    def number(self, name: str, default: float) -> float:
        """Return a floating point attribute, or its default."""
        return float(self.attrs.get(name, default))

    def text(self, name: str, default: str) -> str:
        """Return a string attribute, or its default."""
        found = self.attrs.get(name, default)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)

    def ints(self, name: str) -> list[int] | None:
        """Return an attribute that is a list of integers, or None where it is missing."""
        found = self.attrs.get(name)
        return None if found is None else [int(v) for v in found]


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


def normal_axis(axis: int, rank: int, *, end: bool = False) -> int:
    """Return the axis counted from the front; `end` allows one past the last.

    Raises NodeRefused where the axis is out of range.
    """
    top = rank + 1 if end else rank
    if not -rank <= axis < top:
        raise NodeRefused(f"axis {axis} is out of range for a tensor of {rank} dimensions")
    return axis + rank if axis < 0 else axis


@dataclass(slots=True)
class Reasons:
    """The refusals of a whole graph, so that the user sees all of them at once."""

    general: list[str] = field(default_factory=list)
    _nodes: dict[tuple[str, str, int, str], list[str]] = field(default_factory=dict)

    def add(self, node: onnx.NodeProto, opsets: Mapping[str, int], why: str) -> None:
        """Record that a node cannot be compiled."""
        name = clean(node.name or next((o for o in node.output if o), node.op_type), 80)
        opset = opsets.get(node.domain, 0)
        key = (clean(node.op_type, 80), clean(node.domain, 80), opset, clean(why))
        names = self._nodes.setdefault(key, [])
        if name not in names:
            names.append(name)

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
