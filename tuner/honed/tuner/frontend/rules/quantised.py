"""Operators that ONNX Runtime's quantiser writes (com.microsoft): products of integers, lookups, averages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.call import Call, normal_axis, rule
from honed.tuner.frontend.values import NodeRefused, Value

from .contrib import quantised, real, rounded_from_zero_point
from .layout import reshape, transpose
from .linear import matmul
from .normalisation import standardised
from .pooling import averaged
from .quantisation import (
    dynamically_quantised,
    integer_product,
    requantise,
    scaled_product,
    single,
    widened,
)

DOMAIN = "com.microsoft"


@rule("MatMulIntegerToFloat", domain=DOMAIN)
def matmul_integer_to_float(b: Builder, c: Call) -> Value:
    """A product of 8-bit integers in int32, scaled to float32, plus a bias."""
    for index in (2, 4):
        given = c.opt(index)
        if given is not None and given.size > 1:
            raise NodeRefused("it has scales for the rows of its first input")
    product = integer_product(b, c.x(0), c.opt(4), c.x(1), c.opt(5))
    return scaled_product(b, product, reshape(b, c.x(2), []), c.x(3), c.opt(6))


@rule("DynamicQuantizeMatMul", domain=DOMAIN)
def dynamic_quantize_matmul(b: Builder, c: Call) -> Value:
    """The input quantised by its own range, a product of integers, scaled to float32, plus a bias."""
    x, scale, zero = dynamically_quantised(b, c.x(0))
    return scaled_product(b, integer_product(b, x, zero, c.x(1), c.opt(3)), scale, c.x(2), c.opt(4))


@rule("QGemm", domain=DOMAIN)
def quantised_gemm(b: Builder, c: Call) -> Value:
    """A product of 8-bit integers plus an int32 bias, scaled; quantised where a scale is given for that."""
    x, y = widened(b, c.x(0), c.opt(2), 0), c.x(3)
    wide = widened(b, y, c.opt(5), 0 if c.integer("transB") else 1)
    x = transpose(b, x, [1, 0]) if c.integer("transA") else x
    wide = transpose(b, wide, [1, 0]) if c.integer("transB") else wide
    total, bias = matmul(b, x, wide), c.opt(6)
    total = total if bias is None else b("Add", total, bias)
    alpha = b.like(c.number("alpha", 1.0), c.x(1))
    result = b("Mul", single(b, total), b("Mul", b("Mul", c.x(1), c.x(4)), alpha))
    to, zero = c.opt(7), c.opt(8)
    if to is None:
        return result
    return quantised(b, result, to, zero, c.x(0))


@rule("QLinearAveragePool", domain=DOMAIN)
def qlinear_average_pool(b: Builder, c: Call) -> Value:
    """Averages in float32 of a dequantised tensor, quantised again."""
    x = real(b, c.x(0), c.x(1), c.opt(2))
    last = bool(c.integer("channels_last"))
    inner = list(range(1, x.rank - 1))
    x = transpose(b, x, [0, x.rank - 1, *inner]) if last else x
    y = averaged(b, c, x, counted=bool(c.integer("count_include_pad")))
    y = transpose(b, y, [0, *(i + 1 for i in inner), 1]) if last else y
    return rounded_from_zero_point(b, b("Div", y, c.x(3)), c.opt(4), c.x(0))


@rule("QLinearSoftmax", domain=DOMAIN)
def qlinear_softmax(b: Builder, c: Call) -> Value:
    """Softmax in float32 of a dequantised tensor, quantised again."""
    x = real(b, c.x(0), c.x(1), c.opt(2))
    axis = normal_axis(c.integer("axis", -1), x.rank)
    flat = x
    if c.integer("opset") < 13:
        flat, axis = reshape(b, x, [math.prod(x.shape[:axis]), math.prod(x.shape[axis:])]), 1
    if flat.shape[axis] == 1:
        raise NodeRefused("its axis has one element, for which ONNX Runtime's answer of 1 wraps around to 0")
    shares, zero = reshape(b, b("Softmax", flat, axis=axis), x.shape), c.opt(4)
    # ONNX Runtime takes a whole number of steps to 1: 254 of them where 1 / 255 was rounded up.
    steps = b("Floor", b("Div", b.like(1, shares), c.x(3)))
    zero = b.constant(np.zeros((), c.x(0).dtype)) if zero is None else zero
    return requantise(b, b("Mul", shares, steps), zero)


@rule("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_root_mean_square(b: Builder, c: Call) -> list[Value]:
    """The sum of two tensors (and a bias) over the root of its mean square along the last axis."""
    total, bias = b("Add", c.x(0), c.x(1)), c.opt(3)
    total = total if bias is None else b("Add", total, bias)
    if c.wants(1) or c.wants(2):
        raise NodeRefused("its mean or deviation is wanted; export the model without ONNX Runtime's fusions")
    wide = single(b, total)
    square = b("ReduceMean", b("Mul", wide, wide), b.ints(total.rank - 1), keepdims=1)
    root = b("Sqrt", b("Add", square, b.like(c.number("epsilon", 1e-5), wide)))
    scaled = b("Mul", b("Div", wide, root), single(b, c.x(2)))
    y = scaled if scaled.dtype == total.dtype else b("Cast", scaled, to=TensorProto.FLOAT16)
    return [y, y, y, total]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What EmbedLayerNormalization looks up and scales with, in float."""

    words: Value
    positions: Value
    segments: Value | None
    gamma: Value
    beta: Value


@rule("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalisation(b: Builder, c: Call) -> list[Value]:
    """Embeddings of words, positions and segments added up, and normalised along the last axis."""
    tables = Tables(words=c.x(2), positions=c.x(3), segments=c.opt(4), gamma=c.x(5), beta=c.x(6))
    return _embedded(b, c, tables, c.opt(8))


@rule("QEmbedLayerNormalization", domain=DOMAIN)
def quantised_embed_layer_normalisation(b: Builder, c: Call) -> list[Value]:
    """EmbedLayerNormalization whose tables are of 8-bit integers."""
    words, positions, gamma, beta = (
        real(b, c.x(i), c.x(scale), c.x(scale + 5)) for i, scale in ((2, 8), (3, 9), (5, 11), (6, 12))
    )
    segments = None if c.opt(4) is None else real(b, c.x(4), c.x(10), c.x(15))
    tables = Tables(words=words, positions=positions, segments=segments, gamma=gamma, beta=beta)
    return _embedded(b, c, tables, None)


def _embedded(b: Builder, c: Call, tables: Tables, positions: Value | None) -> list[Value]:
    words, segments, mask = c.x(0), c.opt(1), c.opt(7)
    total = b("Gather", tables.words, words, axis=0)
    if positions is None:
        positions = b.constant(np.arange(words.shape[1], dtype=np.int64)[None, :])
    total = b("Add", total, b("Gather", tables.positions, positions, axis=0))
    if segments is not None and tables.segments is not None:
        total = b("Add", total, b("Gather", tables.segments, segments, axis=0))
    y = standardised(b, total, [total.rank - 1], c.number("epsilon", 1e-12))
    y = b("Add", b("Mul", y, tables.gamma), tables.beta)
    if mask is None:
        return [y, b.constant(np.zeros(words.shape[0], np.int32)), total]
    present = b("Cast", b("Equal", mask, b.like(1, mask)), to=TensorProto.INT32)
    return [y, b("ReduceSum", present, b.ints(1), keepdims=0), total]
