"""ONNX Runtime's own operators (com.microsoft), which its optimiser and quantiser write into models."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.call import Call, first_tensor, normal_axis, rule
from honed.tuner.frontend.values import NodeRefused, Value

from .arithmetic import gelu_of
from .convolution import channel_bias, convolve, geometry
from .layout import transpose
from .linear import gemm, matmul
from .normalisation import standardised
from .quantisation import requantise, saturated, single
from .recurrence import activate
from .reduction import reduce


@rule("FusedMatMul", "TransposeMatMul", domain="com.microsoft")
def fused_matmul(b: Builder, c: Call) -> Value:
    """ONNX Runtime's alpha * A' * B' with axes transposed on request: the last two, batches before rows."""
    x, y = (_laid_out(b, c, c.x(i), side) for i, side in enumerate("AB"))
    result = matmul(b, x, y)
    alpha = c.number("alpha", 1.0)
    return result if alpha == 1.0 else b("Mul", result, b.like(alpha, result))


def _laid_out(b: Builder, c: Call, x: Value, side: str) -> Value:
    order = list(range(x.rank))
    if c.integer(f"transBatch{side}") and x.rank > 2:
        order = [*order[1:-1], 0, order[-1]]
    if c.integer(f"trans{side}") and x.rank > 1:
        order = [*order[:-2], order[-1], order[-2]]
    return transpose(b, x, order)


@rule("FusedGemm", domain="com.microsoft")
def fused_gemm(b: Builder, c: Call) -> Value:
    """Gemm, then an activation."""
    y = first_tensor(gemm(b, c))
    name = c.text("activation", "").lower()
    return activate(b, y, name, c.number("activation_alpha", 0.01), c.number("activation_beta", 0.0))


@rule("Gelu", domain="com.microsoft")
def gelu_microsoft(b: Builder, c: Call) -> Value:
    """ONNX Runtime's own Gelu, by erf."""
    return gelu_of(b, c.x(), tanh=False)


@rule("BiasGelu", domain="com.microsoft")
def bias_gelu(b: Builder, c: Call) -> Value:
    """Gelu of x + bias, by erf."""
    return gelu_of(b, b("Add", c.x(0), c.x(1)), tanh=False)


@rule("FastGelu", domain="com.microsoft")
def fast_gelu(b: Builder, c: Call) -> Value:
    """Gelu of x (+ bias), by tanh."""
    bias = c.opt(1)
    return gelu_of(b, c.x() if bias is None else b("Add", c.x(), bias), tanh=True)


@rule("QuickGelu", domain="com.microsoft")
def quick_gelu(b: Builder, c: Call) -> Value:
    """`x` * sigmoid(alpha * x)."""
    x = c.x()
    return b("Mul", x, b("Sigmoid", b("Mul", x, b.like(c.number("alpha", 1.702), x))))


@rule("FusedConv", domain="com.microsoft")
def fused_conv(b: Builder, c: Call) -> Value:
    """Conv, plus another tensor where one is given, then an activation."""
    x, g = geometry(b, c, c.x(0), c.x(1))
    y, other = channel_bias(b, convolve(b, x, c.x(1), g), c.opt(2)), c.opt(3)
    y = y if other is None else b("Add", y, other)
    name, params = c.text("activation", ""), [float(p) for p in c.attrs.get("activation_params", [])]
    if name in ("Relu", "Sigmoid", "Tanh"):
        return b(name, y)
    if name == "LeakyRelu" and len(params) == 1:
        return b("Where", b("Less", y, b.like(0, y)), b("Mul", y, b.like(params[0], y)), y)
    if name == "Clip" and len(params) == 2:
        return b("Min", b("Max", y, b.like(params[0], y)), b.like(params[1], y))
    if name == "HardSigmoid" and len(params) == 2:
        line = b("Add", b("Mul", y, b.like(params[0], y)), b.like(params[1], y))
        return b("Min", b("Max", line, b.like(0, y)), b.like(1, y))
    raise NodeRefused(
        f"its activation {name!r} is not supported; export the model without ONNX Runtime's fusions"
    )


@rule("SkipLayerNormalization", domain="com.microsoft")
def skip_layer_normalisation(b: Builder, c: Call) -> list[Value]:
    """Layer normalisation of the sum of two tensors (and a bias), along the last axis."""
    total = b("Add", c.x(0), c.x(1))
    bias = c.opt(4)
    total = total if bias is None else b("Add", total, bias)
    if c.wants(1) or c.wants(2):
        raise NodeRefused("its mean or deviation is wanted; export the model without ONNX Runtime's fusions")
    y = b("Mul", standardised(b, total, [total.rank - 1], c.number("epsilon", 1e-12)), c.x(2))
    beta = c.opt(3)
    y = y if beta is None else b("Add", y, beta)
    return [y, y, y, total]


def less_zero(b: Builder, x: Value, zero: Value | None) -> Value:
    """A quantised tensor less its zero point, in int32."""
    wide = b("Cast", x, to=TensorProto.INT32)
    return wide if zero is None else b("Sub", wide, b("Cast", zero, to=TensorProto.INT32))


def real(b: Builder, x: Value, scale: Value, zero: Value | None) -> Value:
    """What a quantised tensor stands for, in float32."""
    return b("Mul", single(b, less_zero(b, x, zero)), scale)


def quantised(b: Builder, y: Value, scale: Value, zero: Value | None, like: Value) -> Value:
    """`y` in steps of `scale`, of the type of `like` where no zero point gives one."""
    return requantise(b, b("Div", y, scale), b.constant(np.zeros((), like.dtype)) if zero is None else zero)


def rounded_from_zero_point(b: Builder, steps: Value, zero: Value | None, like: Value) -> Value:
    """round(steps + zero), saturated: halves go to the even result, where `quantised` takes the even step."""
    zero = b.constant(np.zeros((), like.dtype)) if zero is None else zero
    return saturated(b, b("Round", b("Add", steps, single(b, zero))), zero)


@rule("QLinearAdd", domain="com.microsoft")
def qlinear_add(b: Builder, c: Call) -> Value:
    """The sum in float32 of dequantised tensors, quantised again."""
    x, y = (real(b, c.x(i), c.x(i + 1), c.opt(i + 2)) for i in (0, 3))
    return quantised(b, b("Add", x, y), c.x(6), c.opt(7), c.x(0))


@rule("QLinearMul", domain="com.microsoft")
def qlinear_multiply(b: Builder, c: Call) -> Value:
    """The product of integers less their zero points, scaled and quantised again."""
    x, y = (single(b, less_zero(b, c.x(i), c.opt(i + 2))) for i in (0, 3))
    scale = b("Div", b("Mul", c.x(1), c.x(4)), c.x(6))
    return rounded_from_zero_point(b, b("Mul", b("Mul", x, y), scale), c.opt(7), c.x(0))


@rule("QLinearSigmoid", "QLinearLeakyRelu", domain="com.microsoft")
def qlinear_unary(b: Builder, c: Call) -> Value:
    """The function in float32 of a dequantised tensor, quantised again."""
    x = real(b, c.x(0), c.x(1), c.opt(2))
    if c.op == "QLinearSigmoid":
        y = b("Sigmoid", x)
    else:
        y = b("Where", b("Less", x, b.like(0, x)), b("Mul", x, b.like(c.number("alpha", 0.01), x)), x)
    return quantised(b, y, c.x(3), c.opt(4), c.x(0))


@rule("QLinearGlobalAveragePool", domain="com.microsoft")
def qlinear_global_average(b: Builder, c: Call) -> Value:
    """The mean over the spatial axes of a dequantised tensor, quantised again."""
    x = real(b, c.x(0), c.x(1), c.opt(2))
    first = 1 if c.integer("channels_last") else 2
    axes = list(range(first, first + x.rank - 2))
    return quantised(b, reduce(b, "ReduceMean", x, axes), c.x(3), c.opt(4), c.x(0))


@rule("QLinearConcat", domain="com.microsoft")
def qlinear_concat(b: Builder, c: Call) -> Value:
    """Dequantised tensors joined and quantised again."""
    parts = [real(b, c.x(i), c.x(i + 1), c.opt(i + 2)) for i in range(2, len(c.inputs), 3)]
    axis = normal_axis(c.integer("axis"), parts[0].rank)
    joined = parts[0] if len(parts) == 1 else b("Concat", *parts, axis=axis)
    return quantised(b, joined, c.x(0), c.opt(1), c.x(2))
