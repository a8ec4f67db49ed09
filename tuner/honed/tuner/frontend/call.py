"""Represents a node of the source graph with its inputs resolved, as rewriting rules read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx

from .builder import Builder
from .values import Array, Item, Listing, NodeRefused, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """A node: operator, the opset it is written in, resolved inputs, attributes as Python values."""

    op: str
    domain: str
    opset: int
    node: onnx.NodeProto
    inputs: tuple[Item | None, ...]
    attrs: dict[str, Any]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, empty where one is not needed."""
        return tuple(self.node.output)

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

    def listing(self, index: int = 0) -> Listing:
        """Return input `index`, a sequence."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if isinstance(found, Listing):
            return found
        raise NodeRefused(f"its input {index} is not a sequence known when compiling")

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


Result = Item | Sequence[Item]
Rule = Callable[[Builder, NodeCall], Result]
RULES: dict[tuple[str, str], Rule] = {}
_Rule = TypeVar("_Rule", bound=Rule)


def rule(*ops: str, domain: str = "") -> Callable[[_Rule], _Rule]:
    """Register a rewriting rule for operators.

    The rule returns the value of a single output, or a list with a value for each output, and raises
    NodeRefused where it cannot rewrite the node. `docs/operators.md` describes operators by the first
    paragraph of its docstring, if `tests/tuner/backend/table.py` lists them as limited.
    """

    def register(function: _Rule) -> _Rule:
        for op in ops:
            if (domain, op) in RULES:
                raise ValueError(f"operator {op} has two rules")
            RULES[domain, op] = function
        return function

    return register


def normal_axis(axis: int, rank: int, *, end: bool = False) -> int:
    """Return the axis counted from the front; `end` allows one past the last.

    Raises NodeRefused where the axis is out of range.
    """
    top = rank + 1 if end else rank
    if not -rank <= axis < top:
        raise NodeRefused(f"axis {axis} is out of range for a tensor of {rank} dimensions")
    return axis + rank if axis < 0 else axis
