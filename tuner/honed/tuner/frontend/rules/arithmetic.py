"""Rewriting rules of elementwise operators."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import (
    EmptyOptional,
    Item,
    NodeCall,
    NodeRefused,
    Value,
    elem_type,
    normal_axis,
    numpy_dtype,
)
from honed.tuner.graph.fp16_casts import BIT_CAST

_UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Cos", "Cosh", "Erf",
    "Exp", "Floor", "IsNaN", "Log", "Neg", "Not", "Round", "Sigmoid", "Sin", "Sinh", "Sqrt", "Tan", "Tanh",
)  # fmt: skip
_BINARY = ("Add", "Sub", "Mul", "Div", "And", "Or", "Xor", "Equal", "Less", "Greater")
_BITWISE = ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
Activation = Callable[..., Value]  # Takes a builder, a tensor and numbers


@rule(*_UNARY)
def unary(b: Builder, c: NodeCall) -> Value:
    """The operator itself, elementwise."""
    return b(c.op, c.x())


@rule("Sign")
def sign(b: Builder, c: NodeCall) -> Value:
    """Comparisons with 0; NaN stays NaN, except in fp16 (0), as in ONNX Runtime."""
    x = c.x()
    zero = b.like(0, x)
    if x.dtype.kind in "ub":
        return b("Cast", b("Less", zero, x), to=elem_type(x.dtype))
    negative = b("Cast", b("Less", x, zero), to=elem_type(x.dtype))
    found = b("Sub", b("Cast", b("Less", zero, x), to=elem_type(x.dtype)), negative)
    return b("Where", b("IsNaN", x), x, found) if x.is_float and x.dtype.itemsize > 2 else found


def pair(b: Builder, c: NodeCall) -> tuple[Value, Value]:
    """Return both inputs, the second placed by the `axis` attribute by which opsets below 7 broadcast."""
    x, y = c.x(0), c.x(1)
    if c.opset < 7 and c.integer("broadcast") and y.rank < x.rank and "axis" in c.attrs:
        axis = normal_axis(c.integer("axis"), x.rank)
        y = b("Reshape", y, b.ints(*y.shape, *[1] * (x.rank - axis - y.rank)))
    return x, y


@rule(*_BINARY, *_BITWISE, "LessOrEqual", "GreaterOrEqual")
def binary(b: Builder, c: NodeCall) -> Value:
    """The operator itself, with NumPy broadcasting."""
    x, y = pair(b, c)
    if c.op == "Div" and x.dtype.kind in "iu" and y.data is not None and not y.data.all():
        raise NodeRefused("it divides integers by a constant 0")
    return b(c.op, x, y)


@rule("Pow")
def power(b: Builder, c: NodeCall) -> Value:
    """Products for small constant integer exponents; others keep the type of the base."""
    x, y = pair(b, c)
    exponent = None if y.data is None or y.size != 1 else float(y.data.reshape(-1)[0])
    if exponent is not None and y.rank <= x.rank:
        simple = {0.5: lambda: b("Sqrt", x), 1.0: lambda: x, 2.0: lambda: b("Mul", x, x)}
        simple[3.0] = lambda: b("Mul", x, b("Mul", x, x))
        simple[-1.0] = lambda: b("Div", 1, x)
        if exponent in simple and (x.is_float or exponent in (1.0, 2.0, 3.0)):
            return simple[exponent]()
    if x.is_float:
        return b("Pow", x, b.cast(y, x.dtype))
    wide = TensorProto.FLOAT if x.dtype.itemsize <= 2 else TensorProto.DOUBLE
    result = b("Pow", b("Cast", x, to=wide), b("Cast", y, to=wide))
    return b("Cast", b("Round", result) if y.dtype.kind in "iu" else result, to=elem_type(x.dtype))


@rule("Mod")
def modulo(b: Builder, c: NodeCall) -> Value:
    """The operator itself, with the sign of the divisor; with fmod, of the dividend."""
    x, y = c.x(0), c.x(1)
    if not x.is_float:
        # Narrow integers are computed in 32 bits, because OpenCL's select has no variant for mixed widths.
        wide = x.dtype if x.dtype.itemsize >= 4 else np.int32
        return b.cast(b("Mod", b.cast(x, wide), b.cast(y, wide), fmod=c.integer("fmod")), x.dtype)
    return b("Mod", x, y, fmod=1)


@rule("BitShift")
def shift(b: Builder, c: NodeCall) -> Value:
    """Shifts of unsigned integers; by as many bits as there are, or more, they give 0."""
    x, by = c.x(0), c.x(1)
    shifted = b("BitShift", x, by, direction=c.text("direction", "LEFT"))
    return shifted if by.data is not None else b("Where", b("Less", by, 8 * x.dtype.itemsize), shifted, 0)


@rule("Max", "Min", "Sum", "Mean")
def variadic(b: Builder, c: NodeCall) -> Value:
    """A chain of operations on two operands."""
    op = {"Sum": "Add", "Mean": "Add"}.get(c.op, c.op)
    total = b.chain(op, c.tensors())
    return b("Div", total, len(c.inputs)) if c.op == "Mean" else total


@rule("Where")
def where(b: Builder, c: NodeCall) -> Value:
    """A selection of one of two values."""
    return b("Where", c.x(0), c.x(1), c.x(2))


def activation(op: str, **defaults: float) -> Callable[[Activation], Activation]:
    """Register a function of a tensor, and of attributes with these defaults, as the rule for an operator."""

    def register(function: Activation) -> Activation:
        @functools.wraps(function)
        def apply(b: Builder, c: NodeCall) -> Value:
            return function(b, c.x(), *(c.number(name, default) for name, default in defaults.items()))

        rule(op)(apply)
        return function

    return register


@activation("Reciprocal")
def reciprocal(b: Builder, x: Value) -> Value:
    """The quotient 1 / x."""
    return b("Div", 1, x)


@rule("IsInf")
def is_inf(b: Builder, c: NodeCall) -> Value:
    """Comparisons with the infinities."""
    x = c.x()
    high, low = b("Equal", x, np.inf), b("Equal", x, -np.inf)
    if not c.integer("detect_negative", 1):
        return high if c.integer("detect_positive", 1) else b("Less", x, x)
    return b("Or", high, low) if c.integer("detect_positive", 1) else low


@rule("Clip")
def clip(b: Builder, c: NodeCall) -> Value:
    """Bounds from attributes (opset 6) or inputs (opset 11); NaN means no bound.

    Floats without one of the bounds have the largest finite number for it, as ONNX says.
    """
    x = c.x()
    if c.opset < 11:
        low = b.like(c.number("min", 0.0), x) if "min" in c.attrs else None
        high = b.like(c.number("max", 0.0), x) if "max" in c.attrs else None
    else:
        low, high = c.opt(1), c.opt(2)
    if x.is_float:
        most = float(np.finfo(x.dtype).max)
        low, high = (b.like(end, x) if v is None else v for v, end in ((low, -most), (high, most)))
    return _bound(b, "Min", _bound(b, "Max", x, low), high)


def _bound(b: Builder, op: str, x: Value, bound: Value | None) -> Value:
    """Return the larger or smaller of both, and `x` where the bound is NaN."""
    if bound is None:
        return x
    if not x.is_float or (bound.data is not None and not np.isnan(bound.data).any()):
        return b(op, x, bound)
    beyond = b("Less", x, bound) if op == "Max" else b("Less", bound, x)
    return b("Where", beyond, bound, x)


@rule("Cast", "CastLike")
def cast(b: Builder, c: NodeCall) -> Value:
    """Conversions between the element types that honed supports."""
    x = c.x()
    to = c.integer("to") if c.op == "Cast" else elem_type(c.x(1).dtype)
    if numpy_dtype(to).kind not in "biuf" or numpy_dtype(to).itemsize > 8:
        raise NodeRefused(f"it casts to {TensorProto.DataType.Name(to).lower()}, which honed does not carry")
    return b.cast(x, numpy_dtype(to))


@rule("BitCast")
def bit_cast(b: Builder, c: NodeCall) -> Value:
    """The bits of integers and float32 as another type of as many bits."""
    x, to = c.x(), numpy_dtype(c.integer("to"))
    kinds = {x.dtype.name, to.name}
    if x.dtype.itemsize != to.itemsize or x.dtype.kind not in "iuf" or to.kind not in "iuf":
        raise NodeRefused(f"it takes {x.dtype.name} for {to.name}")
    if not kinds.isdisjoint(
        {"float16", "float64"}
    ):  # Devices may lack these types and compute them in others
        raise NodeRefused(f"it takes {x.dtype.name} for {to.name}; of floats only float32 is supported")
    if x.data is not None:
        return b.constant(x.data.view(to))
    if x.dtype == to:
        return x
    name = b.unique(f"{b.scope}/{BIT_CAST}")
    return b.opaque(helper.make_node(BIT_CAST, [x.name], [name], name=name, to=c.integer("to")), to, x.shape)


@rule("Identity")
def identity(b: Builder, c: NodeCall) -> Item:
    """Removed: the output is the input."""
    return c.inputs[0] or EmptyOptional()


@rule("Dropout")
def dropout(b: Builder, c: NodeCall) -> list[Value]:
    """The input itself when not training; the mask keeps everything."""
    x = c.x()
    training = bool(c.opt_const(2, "training_mode")) if c.opset >= 12 else False
    if c.opset < 7 and not c.integer("is_test"):
        training = "is_test" in c.attrs
    given = c.opt_const(1, "ratio") if training and c.opset >= 12 else None
    ratio = 0.5 if given is None else float(given.reshape(-1)[0])
    if training and ratio != 0.0:
        raise NodeRefused("it is in training mode; export the model for inference")
    mask_type = np.bool_ if c.opset >= 10 else x.dtype
    return [x, b.constant(np.ones(x.shape, mask_type))] if c.wants(1) else [x]


def mix(b: Builder, old: Value, new: Value, share: float) -> Value:
    """Return `share` of the old value plus the rest of the new one."""
    return b("Add", b("Mul", old, share), b("Mul", new, 1 - share))


def plus(b: Builder, x: Value, *others: Value | None) -> Value:
    """Return the sum of `x` and the others that are not None."""
    return functools.reduce(lambda y, other: y if other is None else b("Add", y, other), others, x)


@rule("Relu")
def relu(b: Builder, c: NodeCall) -> Value:
    """The larger of x and 0, max(x, 0)."""
    x = c.x()
    return b("Relu", x) if x.is_float else b("Max", x, 0)


def _positive_or(b: Builder, x: Value, otherwise: Value) -> Value:
    return b("Where", b("Less", x, 0), otherwise, x)


@activation("LeakyRelu", alpha=0.01)
def leaky_relu(b: Builder, x: Value, alpha: float) -> Value:
    """`x` below 0 times alpha."""
    return _positive_or(b, x, b("Mul", x, alpha))


@rule("PRelu")
def prelu(b: Builder, c: NodeCall) -> Value:
    """`x` below 0 times a slope; below opset 7 the slope is per channel."""
    x, slope = c.x(0), c.x(1)
    if c.opset < 7 and slope.rank == 1 and x.rank > 1:
        slope = b("Reshape", slope, b.ints(*slope.shape, *[1] * (x.rank - 2)))
    return _positive_or(b, x, b("Mul", x, slope))


@rule("Elu", "Selu", "Celu")
def elu(b: Builder, c: NodeCall) -> Value:
    """`x` above 0, alpha * (exp(x) - 1) below; Selu scales both, Celu divides x by alpha in exp."""
    x = c.x()
    alpha = c.number("alpha", 1.67326319217681884765625 if c.op == "Selu" else 1.0)
    inner = b("Div", x, alpha) if c.op == "Celu" else x
    # The exponential of large x would give infinities that Where drops, but fp16 devices may trap: cap at 0.
    grown = b("Exp", b("Min", inner, 0))
    result = _positive_or(b, x, b("Mul", b("Sub", grown, 1), alpha))
    if c.op != "Selu":
        return result
    return b("Mul", result, c.number("gamma", 1.05070102214813232421875))


@activation("HardSigmoid", alpha=0.2, beta=0.5)
def hard_sigmoid(b: Builder, x: Value, alpha: float, beta: float) -> Value:
    """The linear function limited to 0..1, max(0, min(1, alpha * x + beta))."""
    return b("Min", b("Max", b("Add", b("Mul", x, alpha), beta), 0), 1)


@activation("HardSwish")
def hard_swish(b: Builder, x: Value) -> Value:
    """`x` * hard sigmoid of x with alpha 1/6, beta 1/2."""
    return b("Mul", x, hard_sigmoid(b, x, 1 / 6, 0.5))


@activation("ThresholdedRelu", alpha=1.0)
def thresholded_relu(b: Builder, x: Value, alpha: float) -> Value:
    """`x` above alpha, else 0."""
    return b("Where", b("Less", alpha, x), x, 0)


@activation("Shrink", lambd=0.5, bias=0.0)
def shrink(b: Builder, x: Value, lambd: float, bias: float) -> Value:
    """`x` moved towards 0 by bias outside [-lambd, lambd], 0 inside."""
    inner = b("Where", b("Less", lambd, x), b("Sub", x, bias), 0)
    return b("Where", b("Less", x, -lambd), b("Add", x, bias), inner)


@activation("Softplus")
def softplus(b: Builder, x: Value) -> Value:
    """The softened maximum log(1 + exp(x))."""
    # Computed without overflow: max(x, 0) + log(1 + exp(-|x|)).
    small = b("Exp", b("Neg", b("Abs", x)))
    return b("Add", b("Max", x, 0), b("Log", b("Add", small, 1)))


@activation("Softsign")
def softsign(b: Builder, x: Value) -> Value:
    """`x` / (1 + |x|)."""
    return b("Div", x, b("Add", b("Abs", x), 1))


@activation("Mish")
def mish(b: Builder, x: Value) -> Value:
    """The product `x` * tanh(softplus(x))."""
    return b("Mul", x, b("Tanh", softplus(b, x)))


@activation("Swish", alpha=1.0)
def swish(b: Builder, x: Value, alpha: float) -> Value:
    """`x` * sigmoid(alpha * x)."""
    return b("Mul", x, b("Sigmoid", x if alpha == 1.0 else b("Mul", x, alpha)))


def gelu_of(b: Builder, x: Value, *, tanh: bool) -> Value:
    """Return `x` times the normal distribution function of x, by erf or tanh (Hendrycks and Gimpel 2016)."""
    if tanh:
        cubed = b("Mul", b("Mul", b("Mul", x, x), x), 0.044715)
        curve = b("Tanh", b("Mul", b("Add", x, cubed), np.sqrt(2 / np.pi)))
    else:
        curve = b("Erf", b("Mul", x, np.sqrt(0.5)))
    return b("Mul", b("Mul", x, 0.5), b("Add", curve, 1))


@rule("Gelu")
def gelu(b: Builder, c: NodeCall) -> Value:
    """Gaussian error linear unit."""
    return gelu_of(b, c.x(), tanh=c.text("approximate", "none") == "tanh")
