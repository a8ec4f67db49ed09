"""Products and convolutions of signed bytes, which devices may have instructions for.

Zero points stay out of them: a sum of (x - p) w is the sum of x w, less p times that of w.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.values import Value

from .convolution import Geometry
from .layout import pad, reshape

_MIDDLE = 128  # of unsigned bytes
_MOST_TERMS = (1 << 31) // _MIDDLE**2 - 1  # sums of more may not fit int32, whatever their order


@dataclass(frozen=True, slots=True)
class SignedBytes:
    """A tensor in int8, and what of it stands for 0: in int32, None where that is 0."""

    data: Value
    zero: Value | None


def is_bytes(x: Value) -> bool:
    """Whether elements are of 8 bits."""
    return x.dtype in (np.int8, np.uint8)


def signed(b: Builder, x: Value, zero: Value | None) -> SignedBytes:
    """Bytes with their zero point as signed ones."""
    moved = None if zero is None else b("Cast", zero, to=TensorProto.INT32)
    if x.dtype == np.uint8:
        wide = b("Sub", b("Cast", x, to=TensorProto.INT32), b.constant(np.int32(_MIDDLE)))
        x = b("Cast", wide, to=TensorProto.INT8)
        moved = b("Sub", b.constant(np.int32(0)) if moved is None else moved, b.constant(np.int32(_MIDDLE)))
    if moved is not None and moved.data is not None and not moved.data.any():
        moved = None
    return SignedBytes(x, moved)


def product(b: Builder, x: Value, x_zero: Value | None, y: Value, y_zero: Value | None) -> Value | None:
    """A product in int32; None where `y` is no constant whose zero point is the middle of its range.

    A zero point of one dimension is for the rows of `x`, or for the columns of `y`.
    """
    if y.data is None or not (is_bytes(x) and is_bytes(y)) or min(x.rank, y.rank) < 2:
        return None
    right = signed(b, y, y_zero)
    if right.zero is not None or right.data.data is None or not 1 < y.shape[-2] <= _MOST_TERMS:
        return None
    left = signed(b, x, x_zero)
    total = b("MatMulInteger", left.data, right.data)
    if left.zero is None:
        return total
    columns = b.constant(right.data.data.sum(-2, dtype=np.int32, keepdims=True))
    zero = left.zero
    if zero.rank == 1 and zero.size > 1:
        zero = reshape(b, zero, [zero.size, 1])
    return b("Sub", total, b("Mul", zero, columns))


def convolution(
    b: Builder, x: Value, x_zero: Value | None, w: Value, w_zero: Value | None, g: Geometry
) -> Value | None:
    """A convolution of two spatial dimensions in int32; None where `w` is no such constant as in `product`.

    What is padded stands for 0.
    """
    if w.data is None or x.rank != 4 or not (is_bytes(x) and is_bytes(w)):
        return None
    right = signed(b, w, w_zero)
    terms = w.size // w.shape[0]
    if right.zero is not None or right.data.data is None or not 1 < terms <= _MOST_TERMS:
        return None
    left = signed(b, x, x_zero)
    padded, before, after = left.data, g.before, g.after
    if left.zero is not None and any([*before, *after]):
        padded, before, after = _padded(b, left, g), [0, 0], [0, 0]
    total = b(
        "ConvInteger",
        padded,
        right.data,
        kernel_shape=list(w.shape[2:]),
        strides=g.strides,
        dilations=g.dilations,
        pads=[*before, *after],
        group=g.group,
    )
    if left.zero is None:
        return total
    kernels = right.data.data.sum((1, 2, 3), dtype=np.int32).reshape(1, -1, 1, 1)
    return b("Sub", total, b("Mul", reshape(b, left.zero, []), b.constant(kernels)))


def _padded(b: Builder, x: SignedBytes, g: Geometry) -> Value:
    """`x` with its zero point around it."""
    assert x.zero is not None
    around = [0, 0, *g.before], [0, 0, *g.after]
    if x.zero.data is not None:
        return pad(b, x.data, *around, int(x.zero.data.reshape(-1)[0]))
    inside = np.pad(
        np.ones((1, 1, *x.data.shape[2:]), np.bool_), [(0, 0), (0, 0), *zip(g.before, g.after, strict=True)]
    )
    zero = b("Cast", reshape(b, x.zero, []), to=TensorProto.INT8)
    return b("Where", b.constant(inside), pad(b, x.data, *around, 0), zero)
