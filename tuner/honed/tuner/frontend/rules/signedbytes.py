"""Products and convolutions of signed bytes, which devices may have instructions for.

Zero points stay out of them: a sum of n terms (x - p) (w - q) is the sum of x w, less p times that of w and q
times that of x, plus n p q.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """A product in int32; None where `y` is no constant.

    A zero point of one dimension is for the rows of `x`, or for the columns of `y`.
    """
    if y.data is None or not (is_bytes(x) and is_bytes(y)) or min(x.rank, y.rank) < 2:
        return None
    left, right, terms = signed(b, x, x_zero), signed(b, y, y_zero), y.shape[-2]
    if right.data.data is None or not 1 < terms <= _MOST_TERMS:
        return None
    total = b("MatMulInteger", left.data, right.data)
    columns = b.constant(right.data.data.sum(-2, dtype=np.int32, keepdims=True))
    if right.zero is not None:
        rows = b("MatMulInteger", left.data, b.constant(np.ones((terms, 1), np.int8)))
        total = b("Sub", total, b("Mul", rows, right.zero))
        columns = b("Sub", columns, b("Mul", right.zero, b.constant(np.int32(terms))))
    if left.zero is None:
        return total
    zero = left.zero
    if zero.rank == 1 and zero.size > 1:
        zero = reshape(b, zero, [zero.size, 1])
    return b("Sub", total, b("Mul", zero, columns))


def convolution(
    b: Builder, x: Value, x_zero: Value | None, w: Value, w_zero: Value | None, g: Geometry
) -> Value | None:
    """A convolution of two spatial dimensions in int32; None where `w` is no constant.

    What is padded stands for 0. A zero point of one dimension is for the output channels.
    """
    if w.data is None or x.rank != 4 or not (is_bytes(x) and is_bytes(w)):
        return None
    left, right = signed(b, x, x_zero), signed(b, w, w_zero)
    terms = w.size // w.shape[0]
    if right.data.data is None or not 1 < terms <= _MOST_TERMS or (right.zero is not None and g.group > 1):
        return None
    image, around = left.data, g
    if left.zero is not None and any([*g.before, *g.after]):
        image, around = _padded(b, left, g), replace(g, before=[0, 0], after=[0, 0])
    total = around.apply(b, "ConvInteger", image, right.data)
    kernels = b.constant(right.data.data.sum((1, 2, 3), dtype=np.int32).reshape(1, -1, 1, 1))
    if right.zero is not None:
        zero = reshape(b, right.zero, [1, right.zero.size, 1, 1])
        ones = b.constant(np.ones((1, *w.shape[1:]), np.int8))
        total = b("Sub", total, b("Mul", around.apply(b, "ConvInteger", image, ones), zero))
        kernels = b("Sub", kernels, b("Mul", zero, b.constant(np.int32(terms))))
    if left.zero is None:
        return total
    return b("Sub", total, b("Mul", reshape(b, left.zero, []), kernels))


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
