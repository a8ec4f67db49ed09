"""Tensors of types that NumPy does not have, into ONNX Runtime and out of it as bits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from honed.runtime.dtypes import NARROW, dtype, from_onnx

Array = NDArray[Any]


_NAMES = frozenset(narrow.name for narrow in NARROW)
_BITS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}  # of those that are less than a byte


def is_narrow(type_name: str) -> bool:
    """Whether ONNX Runtime calls one of these types so, as in "tensor(int4)"."""
    found = from_onnx(type_name)
    return found is not None and found.name in _NAMES


def run_narrow(
    session: onnxruntime.InferenceSession, outputs: Sequence[str], inputs: Mapping[str, Array]
) -> list[Array]:
    """The outputs of a model with inputs or outputs of such types; raises what ONNX Runtime does."""
    given = {name: _given(array) for name, array in inputs.items()}
    return [_taken(value) for value in session.run_with_ort_values(outputs, given)]


def _given(array: Array) -> onnxruntime.OrtValue:
    name = array.dtype.name
    if name not in _NAMES:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))
    bits = np.asarray(array, order="C").view(f"u{array.dtype.itemsize}")
    if name in _BITS:
        bits = np.resize(packed(bits.reshape(-1), _BITS[name]), array.shape)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, dtype(name).number)


def _taken(value: Any) -> Array:
    kept = from_onnx(value.data_type())
    if kept is None or kept.name not in _NAMES:
        found: Array = value.numpy()
        return found
    shape: list[int] = value.shape()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    bits = np.frombuffer(raw, f"u{kept.itemsize}")
    if kept.name in _BITS:
        bits = unpacked(bits, _BITS[kept.name], int(np.prod(shape)), signed=kept.name.startswith("int"))
    elements: Array = bits.view(kept.numpy).reshape(shape)
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
