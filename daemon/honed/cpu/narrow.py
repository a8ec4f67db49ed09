"""Tensors of types that NumPy does not have, into ONNX Runtime and out of it as bits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from honed.runtime.dtypes import dtype

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Narrow:
    """An element type: what it is called in arrays, its number in ONNX, and its bits."""

    dtype: str
    onnx: int
    bits: int


# By what ONNX Runtime calls them; numbers of onnx.proto, which not every version of onnx has names for.
NARROW = {
    "bfloat16": Narrow("bfloat16", 16, 16),
    "float8e4m3fn": Narrow("float8_e4m3fn", 17, 8),
    "float8e4m3fnuz": Narrow("float8_e4m3fnuz", 18, 8),
    "float8e5m2": Narrow("float8_e5m2", 19, 8),
    "float8e5m2fnuz": Narrow("float8_e5m2fnuz", 20, 8),
    "float8e8m0": Narrow("float8_e8m0fnu", 24, 8),
    "int4": Narrow("int4", 22, 4),
    "uint4": Narrow("uint4", 21, 4),
    "int2": Narrow("int2", 26, 2),
    "uint2": Narrow("uint2", 25, 2),
}
_BY_DTYPE = {narrow.dtype: narrow for narrow in NARROW.values()}


def kind(type_name: str) -> str:
    """The element type of what ONNX Runtime calls `tensor(...)`."""
    return type_name.removeprefix("tensor(").removesuffix(")")


def run_narrow(
    session: onnxruntime.InferenceSession, outputs: Sequence[str], inputs: Mapping[str, Array]
) -> list[Array]:
    """The outputs of a model with inputs or outputs of such types; raises what ONNX Runtime does."""
    given = {name: _given(array) for name, array in inputs.items()}
    return [_taken(value) for value in session.run_with_ort_values(outputs, given)]


def _given(array: Array) -> onnxruntime.OrtValue:
    narrow = _BY_DTYPE.get(array.dtype.name)
    if narrow is None:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))
    bits = np.asarray(array, order="C").view(f"u{array.dtype.itemsize}")
    if narrow.bits < 8:
        bits = np.resize(packed(bits.reshape(-1), narrow.bits), array.shape)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, narrow.onnx)


def _taken(value: Any) -> Array:
    narrow = NARROW.get(kind(value.data_type()))
    if narrow is None:
        found: Array = value.numpy()
        return found
    shape: list[int] = value.shape()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    kept = dtype(narrow.dtype).numpy
    bits = np.frombuffer(raw, f"u{kept.itemsize}")
    if narrow.bits < 8:
        bits = unpacked(bits, narrow.bits, int(np.prod(shape)), signed=narrow.dtype.startswith("int"))
    elements: Array = bits.view(kept).reshape(shape)
    return elements


def packed(elements: Array, bits: int) -> Array:
    """Bytes with so many elements each, the first in the lowest bits (ONNX, TensorProto.int32_data)."""
    per = 8 // bits
    padded = np.zeros(-(-elements.size // per) * per, np.uint8)
    padded[: elements.size] = elements & ((1 << bits) - 1)
    shifts = np.arange(per, dtype=np.uint8) * np.uint8(bits)
    whole: Array = np.bitwise_or.reduce(padded.reshape(-1, per) << shifts, axis=1)
    return whole.astype(np.uint8)


def unpacked(whole: Array, bits: int, size: int, *, signed: bool) -> Array:
    """So many elements of what `packed` gives, a byte each; signed ones are extended."""
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    elements: Array = ((whole[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:size].astype(np.uint8)
    if signed:
        sign = np.uint8(1 << (bits - 1))
        elements = (elements ^ sign) - sign
    return elements
