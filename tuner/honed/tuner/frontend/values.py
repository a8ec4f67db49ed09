"""What flows along the edges while a graph is normalised: tensors of known type, and structures of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor: its name in the normalised graph, dtype, static shape, and its data where it is constant."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: Array | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating point (of any width)."""
        return self.dtype.kind == "f"

    def type_proto(self) -> onnx.TypeProto:
        """The same type as ONNX writes it."""
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
    """What a refused node would have given; nodes that need it cannot be judged beyond their name."""


Item = Value | Listing | EmptyOptional | Unknown


class NodeRefused(Exception):
    """One node cannot be compiled; the text says why, without naming the node."""


def elem_type(dtype: np.dtype[Any]) -> int:
    """ONNX's number for a NumPy dtype."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def numpy_dtype(elem: int) -> np.dtype[Any]:
    """NumPy's dtype for ONNX's number; raises NodeRefused where ONNX knows no such type."""
    try:
        found: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(elem))
    except KeyError:
        raise NodeRefused(f"element type number {elem} does not exist") from None
    return found
