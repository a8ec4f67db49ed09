"""Rewriting rules of integer arithmetic and its scales.

Products and convolutions by constant weights are of signed bytes, which devices may have instructions for.
Zero points stay out of them: a sum of n terms (x - p) (w - q) is the sum of x w, less p times that of w and
q times that of x, plus n p q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import (
    Array,
    NodeCall,
    NodeRefused,
    Value,
    elem_type,
    normal_axis,
    numpy_dtype,
)

from .arithmetic import plus
from .convolution import Geometry, channel_bias, geometry, taps
from .layout import pad, pick, reshape
from .linear import matmul
from .reduction import reduce

MAX_TAPS = 128  # Kernel elements an integer convolution may have
_MIDDLE = 128  # Middle of the range of unsigned bytes
_MOST_TERMS = (1 << 31) // _MIDDLE**2 - 1  # Sums of more may not fit int32, whatever their order


def single(b: Builder, x: Value) -> Value:
    """Return `x` cast to float32."""
    return b.cast(x, np.float32)


def requantise(b: Builder, scaled: Value, zero: Value) -> Value:
    """round(scaled) + zero, saturated to the integer type of `zero`."""
    moved = b("Add", b("Round", scaled), b("Cast", zero, to=elem_type(scaled.dtype)))
    return saturate(b, moved, zero)


def saturate(b: Builder, moved: Value, zero: Value) -> Value:
    """Whole numbers in float in the integer type of `zero`."""
    limits = np.iinfo(zero.dtype)
    bounded = b("Min", b("Max", moved, limits.min), limits.max)
    return b("Cast", bounded, to=elem_type(zero.dtype))


def widen(b: Builder, x: Value, zero: Value | None, axis: int) -> Value:
    """`x - zero` in int32; a zero point of one dimension lies along an axis of `x`."""
    wide = b("Cast", x, to=TensorProto.INT32)
    if zero is None or (zero.data is not None and not zero.data.any()):
        return wide
    if zero.rank == 1 and zero.size > 1:
        zero = reshape(b, zero, [zero.size] + [1] * (x.rank - 1 - axis))
    return b("Sub", wide, b("Cast", zero, to=TensorProto.INT32))


def integer_product(b: Builder, x: Value, x_zero: Value | None, y: Value, y_zero: Value | None) -> Value:
    """A product in int32 of integers less zero points, which may be for rows of `x`, columns of `y`."""
    made = _multiply_signed(b, x, x_zero, y, y_zero)
    if made is not None:
        return made
    return matmul(b, widen(b, x, x_zero, x.rank - 2), widen(b, y, y_zero, y.rank - 1))


def scale_product(b: Builder, product: Value, x_scale: Value, y_scale: Value, bias: Value | None) -> Value:
    """An integer product in float32; a scale of one dimension is for the columns."""
    return plus(b, b("Mul", single(b, product), b("Mul", x_scale, y_scale)), bias)


@rule("MatMulInteger")
def matmul_integer(b: Builder, c: NodeCall) -> Value:
    """A product of 8-bit integers in int32."""
    return integer_product(b, c.x(0), c.opt(2), c.x(1), c.opt(3))


@rule("QLinearMatMul")
def qlinear_matmul(b: Builder, c: NodeCall) -> Value:
    """Integer product, scaled and rounded to the type of the output."""
    x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero = (c.x(i) for i in range(8))
    if z_zero.dtype.kind == "i" and z_scale.data is None:
        # Calibrated scales mean saturation, as in ONNX's text and ONNX Runtime.
        raise NodeRefused("on int8 overflow ONNX's text and its evaluator contradict each other; use uint8")
    product = integer_product(b, x, x_zero, y, y_zero)
    if x_scale.rank == 1 and x_scale.size > 1:
        x_scale = reshape(b, x_scale, [x_scale.size, 1])
    scale = b("Div", b("Mul", single(b, x_scale), single(b, y_scale)), single(b, z_scale))
    return requantise(b, b("Mul", single(b, product), scale), z_zero)


def convolve_integers(b: Builder, x: Value, w: Value, g: Geometry) -> Value:
    """A convolution in int32 as one matrix product for each kernel element: ONNX's Conv is for floats."""
    if not w.size:
        raise NodeRefused("its kernel is empty")
    if math.prod(w.shape[2:]) > MAX_TAPS:
        raise NodeRefused(f"its integer kernel of {math.prod(w.shape[2:])} elements is too large")
    n, channels = x.shape[:2]
    outputs = [
        (extent + low + high - (k - 1) * d - 1) // s + 1
        for extent, low, high, k, d, s in zip(
            x.shape[2:], g.before, g.after, w.shape[2:], g.dilations, g.strides, strict=True
        )
    ]
    padded = pad(b, x, [0, 0, *g.before], [0, 0, *g.after], 0)
    kernel = reshape(b, w, [1, g.group, w.shape[0] // g.group, w.shape[1], math.prod(w.shape[2:])])

    def products() -> Iterator[Value]:
        for index, tap in enumerate(taps(b, padded, w.shape[2:], g.strides, g.dilations, outputs)):
            columns = reshape(b, tap, [n, g.group, channels // g.group, math.prod(outputs)])
            yield matmul(b, pick(b, kernel, 4, index), columns)

    return reshape(b, b.chain("Add", products()), [n, w.shape[0], *outputs])


@rule("ConvInteger")
def conv_integer(b: Builder, c: NodeCall) -> Value:
    """Convolution of 8-bit integers in int32; padding has the value of the zero point."""
    return _convolve(b, c, c.x(0), c.opt(2), c.x(1), c.opt(3))


def _convolve(
    b: Builder, c: NodeCall, x: Value, x_zero: Value | None, w: Value, w_zero: Value | None
) -> Value:
    """The convolution in int32 that a call's attributes describe, of integers with their zero points."""
    cut_x, g = geometry(b, c, x, w)
    made = _convolve_signed(b, cut_x, x_zero, w, w_zero, g)
    if made is not None:
        return made
    return convolve_integers(b, widen(b, cut_x, x_zero, 0), widen(b, w, w_zero, 0), g)


@rule("QLinearConv")
def qlinear_conv(b: Builder, c: NodeCall) -> Value:
    """Integer convolution, scaled and rounded to the type of the output."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (c.x(i) for i in range(8))
    total = channel_bias(b, _convolve(b, c, x, x_zero, w, w_zero), c.opt(8))
    if w_scale.rank == 1 and w_scale.size > 1:
        w_scale = reshape(b, w_scale, [1, w_scale.size] + [1] * (x.rank - 2))
    scale = b("Div", b("Mul", x_scale, w_scale), y_scale)
    return requantise(b, b("Mul", single(b, total), scale), y_zero)


def _broadcast(b: Builder, c: NodeCall, v: Value, x: Value) -> Value:
    """A scale or zero point laid out to broadcast over `x`: one number, one per slice, or one per block."""
    if v.size == 1 and c.integer("block_size") == 0:
        return reshape(b, v, [])
    axis, block = normal_axis(c.integer("axis", 1), x.rank), c.integer("block_size")
    if block:
        each = np.arange(x.shape[axis], dtype=np.int64) // block
        return b("Gather", v, b.constant(each), axis=axis)
    if v.rank != 1 or v.size != x.shape[axis]:
        raise NodeRefused(f"its scale of shape {list(v.shape)} does not fit axis {axis} of {list(x.shape)}")
    return reshape(b, v, [v.size] + [1] * (x.rank - axis - 1))


def _integer_type(dtype: np.dtype[np.generic]) -> None:
    if dtype.kind not in "iu":
        raise NodeRefused(f"it quantises to {dtype.name}, which honed does not carry")


@rule("QuantizeLinear")
def quantize(b: Builder, c: NodeCall) -> Value:
    """round(x / scale) + zero point, saturated."""
    x, scale, zero = c.x(0), c.x(1), c.opt(2)
    to = numpy_dtype(c.integer("output_dtype") or TensorProto.UINT8) if zero is None else zero.dtype
    _integer_type(to)
    zero = b.constant(np.zeros(scale.shape, to)) if zero is None else zero
    wide, step = single(b, x), single(b, _broadcast(b, c, scale, x))
    return requantise(b, b("Div", wide, step), _broadcast(b, c, zero, x))


@rule("DequantizeLinear")
def dequantize(b: Builder, c: NodeCall) -> Value:
    """(x - zero point) * scale."""
    x, scale, zero = c.x(0), c.x(1), c.opt(2)
    _integer_type(x.dtype)
    wide = b("Cast", x, to=TensorProto.INT32)
    if zero is not None:
        wide = b("Sub", wide, b("Cast", _broadcast(b, c, zero, x), to=TensorProto.INT32))
    to = c.integer("output_dtype") or elem_type(scale.dtype)
    result = b("Mul", single(b, wide), single(b, _broadcast(b, c, scale, x)))
    return b.cast(result, numpy_dtype(to))


@rule("DynamicQuantizeLinear")
def dynamic_quantize(b: Builder, c: NodeCall) -> list[Value]:
    """Scale and zero point from the range of the data and 0 (ONNX's definition)."""
    return list(dynamically_quantised(b, c.x()))


def dynamically_quantised(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """`x` in uint8, its scale and its zero point."""
    axes, nought = list(range(x.rank)), b.like(0, x)
    high = b("Max", reduce(b, "ReduceMax", x, axes, keepdims=False), nought)
    low = b("Min", reduce(b, "ReduceMin", x, axes, keepdims=False), nought)
    spread = b("Sub", high, low)
    # ONNX's text divides 0 by 0 where all is 0, and ONNX Runtime uses a scale of 1.
    scale = b("Where", b("Equal", spread, nought), 1, b("Div", spread, 255))
    zero = b("Min", b("Max", b("Round", b("Div", b("Neg", low), scale)), nought), 255)
    point = b("Cast", zero, to=TensorProto.UINT8)
    return requantise(b, b("Div", x, scale), point), scale, point


def _is_bytes(x: Value) -> bool:
    """Return whether elements are of 8 bits."""
    return x.dtype in (np.int8, np.uint8)


def _as_signed(b: Builder, x: Value, zero: Value | None) -> tuple[Value, Value | None]:
    """Return bytes as int8, and their zero point: in int32, None where that is 0."""
    moved = None if zero is None else b("Cast", zero, to=TensorProto.INT32)
    if x.dtype == np.uint8:
        wide = b("Sub", b("Cast", x, to=TensorProto.INT32), b.constant(np.int32(_MIDDLE)))
        x = b("Cast", wide, to=TensorProto.INT8)
        moved = b("Sub", b.constant(np.int32(0)) if moved is None else moved, b.constant(np.int32(_MIDDLE)))
    if moved is not None and moved.data is not None and not moved.data.any():
        moved = None
    return x, moved


def _multiply_signed(
    b: Builder, x: Value, x_zero: Value | None, y: Value, y_zero: Value | None
) -> Value | None:
    """Return a product in int32; None where `y` is no constant.

    A zero point of one dimension is for the rows of `x`, or for the columns of `y`.
    """
    if y.data is None or not (_is_bytes(x) and _is_bytes(y)) or min(x.rank, y.rank) < 2:
        return None
    (x, x_zero), (y, y_zero), terms = _as_signed(b, x, x_zero), _as_signed(b, y, y_zero), y.shape[-2]
    if y.data is None or not 1 < terms <= _MOST_TERMS:
        return None
    if x_zero is not None and x_zero.rank == 1 and x_zero.size > 1:
        x_zero = reshape(b, x_zero, [x_zero.size, 1])
    sums = y.data.sum(-2, dtype=np.int32, keepdims=True)
    ones = np.ones((terms, 1), np.int8)
    return _less_zeros(b, partial(b, "MatMulInteger", x), x_zero, y, y_zero, ones, sums, terms)


def _less_zeros(
    b: Builder,
    times: Callable[[Value], Value],
    x_zero: Value | None,
    w: Value,
    w_zero: Value | None,
    ones: Array,
    sums: Array,
    terms: int,
) -> Value:
    """Return `times(w)`, sums of that many terms each, as if the zero points had been subtracted before.

    `ones` are weights that sum up the other operand, `sums` those of the weights.
    """
    total, of_weights = times(w), b.constant(sums)
    if w_zero is not None:
        total = b("Sub", total, b("Mul", times(b.constant(ones)), w_zero))
        of_weights = b("Sub", of_weights, b("Mul", w_zero, terms))
    return total if x_zero is None else b("Sub", total, b("Mul", x_zero, of_weights))


def _convolve_signed(
    b: Builder, x: Value, x_zero: Value | None, w: Value, w_zero: Value | None, g: Geometry
) -> Value | None:
    """Return a convolution of two spatial dimensions in int32; None where `w` is no constant.

    Padding stands for 0. A zero point of one dimension is for the output channels.
    """
    if w.data is None or x.rank != 4 or not (_is_bytes(x) and _is_bytes(w)):
        return None
    (x, x_zero), (w, w_zero) = _as_signed(b, x, x_zero), _as_signed(b, w, w_zero)
    terms = w.size // w.shape[0]
    if w.data is None or not 1 < terms <= _MOST_TERMS or (w_zero is not None and g.group > 1):
        return None
    if x_zero is not None:
        if any([*g.before, *g.after]):
            x, g = _pad(b, x, x_zero, g), replace(g, before=[0, 0], after=[0, 0])
        x_zero = reshape(b, x_zero, [])
    if w_zero is not None:
        w_zero = reshape(b, w_zero, [1, w_zero.size, 1, 1])
    sums = w.data.sum((1, 2, 3), dtype=np.int32).reshape(1, -1, 1, 1)
    ones = np.ones((1, *w.shape[1:]), np.int8)
    return _less_zeros(b, partial(g.apply, b, "ConvInteger", x), x_zero, w, w_zero, ones, sums, terms)


def _pad(b: Builder, x: Value, zero: Value, g: Geometry) -> Value:
    """`x` with its zero point around it."""
    around = [0, 0, *g.before], [0, 0, *g.after]
    if zero.data is not None:
        return pad(b, x, *around, int(zero.data.reshape(-1)[0]))
    inside = np.ones((1, 1, *x.shape[2:]), np.bool_)
    inside = np.pad(inside, [(0, 0), (0, 0), *zip(g.before, g.after, strict=True)])
    zero = b("Cast", reshape(b, zero, []), to=TensorProto.INT8)
    return b("Where", b.constant(inside), pad(b, x, *around, 0), zero)
