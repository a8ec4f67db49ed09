"""Rewriting rules of ONNX Runtime's own operators (com.microsoft), as its optimiser and quantiser write.

Weights of few bits, in blocks that share a scale, stay packed in the compiled file, with the lowest bits of a
byte first. The nodes that unpack them are part of the graph; the lowering fuses them with the product that
reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import RULES, Result, rule
from honed.tuner.frontend.values import Array, NodeCall, NodeRefused, Value, normal_axis

from .arithmetic import gelu_of, plus
from .convolution import channel_bias, convolve, geometry
from .indexing import wrap_indices
from .layout import cut, flatten_at, join, pad_axis, pad_rule, reshape, transpose, with_axis
from .linear import gemm, matmul
from .pooling import average_windows, max_pool
from .quantisation import (
    dynamically_quantised,
    integer_product,
    qlinear_conv,
    requantise,
    saturate,
    scale_product,
    single,
    widen,
)
from .recurrence import activate
from .reduction import over_root_mean_square, reduce, standardise

DOMAIN = "com.microsoft"
_NEWEST = 13  # The opset for operators whose inputs are those of this opset
_FEW_BITS = (2, 4, 8)
# Types of numbers of 4 bits, with the addend that makes all of them positive or 0
_FOUR_BITS = {"uint4": 0, "int4": 8}
_LEAST_BLOCK = 16  # Numbers that share a scale


@rule("FusedMatMul", "TransposeMatMul", domain=DOMAIN)
def fused_matmul(b: Builder, c: NodeCall) -> Value:
    """`alpha` * A' * B', with the axes of A and B permuted as ONNX Runtime's attributes say."""
    x, y = (_lay_out(b, c, c.x(i), side) for i, side in enumerate("AB"))
    result = matmul(b, x, y)
    alpha = c.number("alpha", 1.0)
    return result if alpha == 1.0 else b("Mul", result, alpha)


def _lay_out(b: Builder, c: NodeCall, x: Value, side: str) -> Value:
    order = list(range(x.rank))
    if c.integer(f"transBatch{side}") and x.rank > 2:
        order = [*order[1:-1], 0, order[-1]]
    if c.integer(f"trans{side}") and x.rank > 1:
        order = [*order[:-2], order[-1], order[-2]]
    return transpose(b, x, order)


@rule("FusedGemm", domain=DOMAIN)
def fused_gemm(b: Builder, c: NodeCall) -> Value:
    """Gemm, then an activation."""
    name = c.text("activation", "").lower()
    return activate(b, gemm(b, c), name, c.number("activation_alpha", 0.01), c.number("activation_beta", 0.0))


@rule("Gelu", "BiasGelu", "FastGelu", domain=DOMAIN)
def gelu_microsoft(b: Builder, c: NodeCall) -> Value:
    """Gelu of x (+ bias), by erf; FastGelu by tanh."""
    return gelu_of(b, plus(b, c.x(), c.opt(1)), tanh=c.op == "FastGelu")


@rule("QuickGelu", domain=DOMAIN)
def quick_gelu(b: Builder, c: NodeCall) -> Value:
    """`x` * sigmoid(alpha * x)."""
    x = c.x()
    return b("Mul", x, b("Sigmoid", b("Mul", x, c.number("alpha", 1.702))))


@rule("FusedConv", domain=DOMAIN)
def fused_conv(b: Builder, c: NodeCall) -> Value:
    """Conv, plus an optional tensor, then an activation."""
    x, g = geometry(b, c, c.x(0), c.x(1))
    y = plus(b, channel_bias(b, convolve(b, x, c.x(1), g), c.opt(2)), c.opt(3))
    name, params = c.text("activation", ""), [float(p) for p in c.attrs.get("activation_params", [])]
    if name == "Clip" and len(params) == 2:
        return b("Min", b("Max", y, params[0]), params[1])
    if name in ("Relu", "Sigmoid", "Tanh") or (name, len(params)) in (("LeakyRelu", 1), ("HardSigmoid", 2)):
        return activate(b, y, name.lower(), *(*params, 0.0, 0.0)[:2])
    raise NodeRefused(
        f"its activation {name!r} is not supported; export the model without ONNX Runtime's fusions"
    )


@rule("SkipLayerNormalization", domain=DOMAIN)
def skip_layer_normalisation(b: Builder, c: NodeCall) -> list[Value]:
    """Layer normalisation of the sum of two tensors (and a bias), along the last axis."""
    total = _add_skip(b, c, 4)
    y = b("Mul", standardise(b, total, [total.rank - 1], c.number("epsilon", 1e-12)), c.x(2))
    y = plus(b, y, c.opt(3))
    return [y, y, y, total]


def _add_skip(b: Builder, c: NodeCall, bias: int) -> Value:
    """The sum of the first two inputs, and the one of number `bias`."""
    total = plus(b, c.x(0), c.x(1), c.opt(bias))
    if c.wants(1) or c.wants(2):
        raise NodeRefused("its mean or deviation is wanted; export the model without ONNX Runtime's fusions")
    return total


def less_zero(b: Builder, x: Value, zero: Value | None) -> Value:
    """A quantised tensor less its zero point, in int32."""
    wide = b("Cast", x, to=TensorProto.INT32)
    return wide if zero is None else b("Sub", wide, b("Cast", zero, to=TensorProto.INT32))


def real(b: Builder, x: Value, scale: Value, zero: Value | None) -> Value:
    """Return the real values of a quantised tensor, in float32."""
    return b("Mul", single(b, less_zero(b, x, zero)), scale)


def quantise(b: Builder, y: Value, scale: Value, zero: Value | None, like: Value) -> Value:
    """`y` in steps of `scale`, of the type of `like` where no zero point gives one."""
    return requantise(b, b("Div", y, scale), _zero_or(b, zero, like))


def _zero_or(b: Builder, zero: Value | None, like: Value) -> Value:
    return b.constant(np.zeros((), like.dtype)) if zero is None else zero


def round_from_zero_point(b: Builder, steps: Value, zero: Value | None, like: Value) -> Value:
    """round(steps + zero), saturated: halves go to the even result, where `quantise` takes the even step."""
    zero = _zero_or(b, zero, like)
    return saturate(b, b("Round", b("Add", steps, single(b, zero))), zero)


@rule("QLinearAdd", domain=DOMAIN)
def qlinear_add(b: Builder, c: NodeCall) -> Value:
    """Computed in float32 on dequantised tensors, then quantised again."""
    x, y = (real(b, c.x(i), c.x(i + 1), c.opt(i + 2)) for i in (0, 3))
    return quantise(b, b("Add", x, y), c.x(6), c.opt(7), c.x(0))


@rule("QLinearMul", domain=DOMAIN)
def qlinear_multiply(b: Builder, c: NodeCall) -> Value:
    """The product of integers minus their zero points, scaled and quantised again."""
    x, y = (single(b, less_zero(b, c.x(i), c.opt(i + 2))) for i in (0, 3))
    scale = b("Div", b("Mul", c.x(1), c.x(4)), c.x(6))
    return round_from_zero_point(b, b("Mul", b("Mul", x, y), scale), c.opt(7), c.x(0))


@rule("QLinearSigmoid", "QLinearLeakyRelu", domain=DOMAIN)
def qlinear_unary(b: Builder, c: NodeCall) -> Value:
    """Computed in float32 on dequantised tensors, then quantised again."""
    x = real(b, c.x(0), c.x(1), c.opt(2))
    name = c.op.removeprefix("QLinear").lower()
    y = activate(b, x, name, c.number("alpha", 0.01), 0.0)
    return quantise(b, y, c.x(3), c.opt(4), c.x(0))


@rule("QLinearGlobalAveragePool", domain=DOMAIN)
def qlinear_global_average(b: Builder, c: NodeCall) -> Value:
    """Computed in float32 on dequantised tensors, then quantised again."""
    x = real(b, c.x(0), c.x(1), c.opt(2))
    first = 1 if c.integer("channels_last") else 2
    axes = list(range(first, first + x.rank - 2))
    return quantise(b, reduce(b, "ReduceMean", x, axes), c.x(3), c.opt(4), c.x(0))


@rule("QLinearConcat", domain=DOMAIN)
def qlinear_concat(b: Builder, c: NodeCall) -> Value:
    """Computed in float32 on dequantised tensors, then quantised again."""
    parts = [real(b, c.x(i), c.x(i + 1), c.opt(i + 2)) for i in range(2, len(c.inputs), 3)]
    axis = normal_axis(c.integer("axis"), parts[0].rank)
    return quantise(b, join(b, parts, axis), c.x(0), c.opt(1), c.x(2))


@rule("DequantizeLinear", "GatherND", "GridSample", "QuantizeLinear", "Range", "Trilu", domain=DOMAIN)
def as_in_onnx(b: Builder, c: NodeCall) -> Result:
    """ONNX's operator of the same name."""
    return RULES["", c.op](b, replace(c, domain="", opset=_NEWEST))


@rule("Pad", domain=DOMAIN)
def pad_microsoft(b: Builder, c: NodeCall) -> Value:
    """ONNX's Pad; the amounts may also be a row of a matrix."""
    amounts = b.constant(c.const(1, "pads").reshape(-1))
    call = replace(c, domain="", opset=_NEWEST, inputs=(c.x(0), amounts, *c.inputs[2:]))
    return pad_rule(b, call)


@rule("ExpandDims", domain=DOMAIN)
def expand_dims(b: Builder, c: NodeCall) -> Value:
    """Insert a dimension of size 1."""
    x = c.x(0)
    return with_axis(b, x, normal_axis(c.numbers(1, "axis")[0], x.rank + 1))


@rule("MatMulInteger16", domain=DOMAIN)
def matmul_integer_16(b: Builder, c: NodeCall) -> Value:
    """A product of 16-bit integers in int32."""
    return matmul(b, widen(b, c.x(0), None, 0), widen(b, c.x(1), None, 0))


def _channels_first(b: Builder, x: Value) -> Value:
    return transpose(b, x, [0, x.rank - 1, *range(1, x.rank - 1)])


def _channels_last(b: Builder, x: Value) -> Value:
    return transpose(b, x, [0, *range(2, x.rank), 1])


@rule("QLinearConv", domain=DOMAIN)
def quantised_conv(b: Builder, c: NodeCall) -> Value:
    """ONNX's QLinearConv; channels may be the last axis."""
    if not c.integer("channels_last"):
        return qlinear_conv(b, c)
    call = replace(c, inputs=(_channels_first(b, c.x(0)), *c.inputs[1:]))
    return _channels_last(b, qlinear_conv(b, call))


@rule("NhwcMaxPool", domain=DOMAIN)
def max_pool_channels_last(b: Builder, c: NodeCall) -> Value:
    """ONNX's MaxPool with channels on the last axis."""
    call = replace(c, domain="", opset=_NEWEST, inputs=(_channels_first(b, c.x(0)),))
    return _channels_last(b, max_pool(b, call)[0])


@rule("QLinearWhere", domain=DOMAIN)
def qlinear_where(b: Builder, c: NodeCall) -> Value:
    """Computed in float32 on dequantised tensors, then quantised again."""
    x, y = (real(b, c.x(i), c.x(i + 1), c.x(i + 2)) for i in (1, 4))
    chosen = b("Where", b("Cast", c.x(0), to=TensorProto.BOOL), x, y)
    return quantise(b, chosen, c.x(7), c.x(8), c.x(1))


@rule("MatMulIntegerToFloat", domain=DOMAIN)
def matmul_integer_to_float(b: Builder, c: NodeCall) -> Value:
    """A product of 8-bit integers in int32, scaled to float32, plus a bias."""
    for index in (2, 4):
        given = c.opt(index)
        if given is not None and given.size > 1:
            raise NodeRefused("it has scales for the rows of its first input")
    product = integer_product(b, c.x(0), c.opt(4), c.x(1), c.opt(5))
    return scale_product(b, product, reshape(b, c.x(2), []), c.x(3), c.opt(6))


@rule("DynamicQuantizeMatMul", domain=DOMAIN)
def dynamic_quantize_matmul(b: Builder, c: NodeCall) -> Value:
    """The input quantised by its own range, a product of integers, scaled to float32, plus a bias."""
    x, scale, zero = dynamically_quantised(b, c.x(0))
    return scale_product(b, integer_product(b, x, zero, c.x(1), c.opt(3)), scale, c.x(2), c.opt(4))


@rule("QGemm", domain=DOMAIN)
def quantised_gemm(b: Builder, c: NodeCall) -> Value:
    """A product of 8-bit integers plus an int32 bias, scaled; quantised if an output scale is given."""
    x, y = widen(b, c.x(0), c.opt(2), 0), c.x(3)
    wide = widen(b, y, c.opt(5), 0 if c.integer("transB") else 1)
    x = transpose(b, x, [1, 0]) if c.integer("transA") else x
    wide = transpose(b, wide, [1, 0]) if c.integer("transB") else wide
    total = plus(b, matmul(b, x, wide), c.opt(6))
    scale = c.x(1), c.x(4)
    result = b("Mul", single(b, total), b("Mul", b("Mul", *scale), c.number("alpha", 1.0)))
    to = c.opt(7)
    return result if to is None else quantise(b, result, to, c.opt(8), c.x(0))


@rule("QLinearAveragePool", domain=DOMAIN)
def qlinear_average_pool(b: Builder, c: NodeCall) -> Value:
    """Computed in float32 on dequantised tensors, then quantised again."""
    x = real(b, c.x(0), c.x(1), c.opt(2))
    x = _channels_first(b, x) if c.integer("channels_last") else x
    y = average_windows(b, c, x, counted=bool(c.integer("count_include_pad")))
    y = _channels_last(b, y) if c.integer("channels_last") else y
    return round_from_zero_point(b, b("Div", y, c.x(3)), c.opt(4), c.x(0))


@rule("QLinearSoftmax", domain=DOMAIN)
def qlinear_softmax(b: Builder, c: NodeCall) -> Value:
    """Computed in float32 on dequantised tensors, then quantised again."""
    x = real(b, c.x(0), c.x(1), c.opt(2))
    axis = normal_axis(c.integer("axis", -1), x.rank)
    flat = x
    if c.integer("opset") < 13:
        flat, axis = flatten_at(b, x, axis), 1
    if flat.shape[axis] == 1:
        raise NodeRefused("its axis has one element, for which ONNX Runtime's answer of 1 wraps around to 0")
    shares = reshape(b, b("Softmax", flat, axis=axis), x.shape)
    # ONNX Runtime maps 1 to a whole number of steps: 254 of them where 1 / 255 was rounded up.
    steps = b("Floor", b("Div", 1, c.x(3)))
    return requantise(b, b("Mul", shares, steps), _zero_or(b, c.opt(4), c.x(0)))


@rule("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_root_mean_square(b: Builder, c: NodeCall) -> list[Value]:
    """The sum of two tensors (and a bias) over its root mean square along the last axis."""
    total = _add_skip(b, c, 3)
    even = over_root_mean_square(b, single(b, total), [total.rank - 1], c.number("epsilon", 1e-5))
    scaled = b("Mul", even, single(b, c.x(2)))
    y = b.cast(scaled, total.dtype)
    return [y, y, y, total]


@rule("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalisation(b: Builder, c: NodeCall) -> list[Value]:
    """The sum of embeddings of words, positions and segments, normalised along the last axis."""
    return _embed(b, c, [c.x(2), c.x(3), c.opt(4), c.x(5), c.x(6)], c.opt(8))


@rule("QEmbedLayerNormalization", domain=DOMAIN)
def quantised_embed_layer_normalisation(b: Builder, c: NodeCall) -> list[Value]:
    """EmbedLayerNormalization whose tables are of 8-bit integers."""
    tables = [real(b, c.x(i), c.x(i + 6), c.x(i + 11)) for i in (2, 3, 5, 6)]
    segments = None if c.opt(4) is None else real(b, c.x(4), c.x(10), c.x(15))
    return _embed(b, c, [*tables[:2], segments, *tables[2:]], None)


def _embed(b: Builder, c: NodeCall, tables: Sequence[Value | None], positions: Value | None) -> list[Value]:
    """Return the outputs; `tables` are of words, positions and segments, which may be left out.

    Then gamma and beta.
    """
    words, segments, mask = c.x(0), c.opt(1), c.opt(7)
    of_words, of_positions, of_segments, gamma, beta = tables
    for numbers, table in ((words, of_words), (positions, of_positions), (segments, of_segments)):
        if numbers is not None and table is not None:
            b.rely(numbers, 0, table.shape[0] - 1, "rows of its tables")
    total = b("Gather", of_words, words, axis=0)
    if positions is None:
        positions = b.constant(np.arange(words.shape[1], dtype=np.int64)[None, :])
    total = b("Add", total, b("Gather", of_positions, positions, axis=0))
    if segments is not None and of_segments is not None:
        total = b("Add", total, b("Gather", of_segments, segments, axis=0))
    y = standardise(b, total, [total.rank - 1], c.number("epsilon", 1e-12))
    y = b("Add", b("Mul", y, gamma), beta)
    if mask is None:
        return [y, b.constant(np.zeros(words.shape[0], np.int32)), total]
    present = b("Cast", b("Equal", mask, 1), to=TensorProto.INT32)
    return [y, b("ReduceSum", present, b.ints(1), keepdims=0), total]


@rule("MatMulNBits", domain=DOMAIN)
def matmul_few_bits(b: Builder, c: NodeCall) -> Value:
    """A product with constant weights of 2, 4 or 8 bits, which stay packed; its input is never quantised."""
    bits, block = c.integer("bits", 4), c.integer("block_size")
    terms, columns = c.integer("K"), c.integer("N")
    if bits not in _FEW_BITS or block < _LEAST_BLOCK or columns < 1 or terms < 1:
        raise NodeRefused(f"its weights of {bits} bits in blocks of {block} are not supported")
    if c.integer("weight_prepacked") or c.opt(4) is not None:
        raise NodeRefused("its weights are ordered for one machine, or by groups; export it without that")
    zeros = c.opt_const(3, "zero points")
    if c.x(1).dtype != np.uint8 or (
        zeros is not None and zeros.dtype.kind in "iu" and zeros.dtype != np.uint8
    ):
        raise NodeRefused("its weights or zero points are not packed into bytes; export it with uint8")
    x, scales = c.x(0), c.const(2, "scales")
    blocks = -(-terms // block)
    # Blocks of words, and a row for each word along the sum: neighbours are of neighbouring columns.
    words = np.ascontiguousarray(c.const(1, "weights").reshape(columns, -1)).view("<u4").astype(np.uint32)
    weights = _unpack(b, words.T.reshape(blocks, -1, 1, columns), bits, axis=2)
    if zeros is None:
        middle = b.like(1 << (bits - 1), x)
    else:
        if zeros.dtype == np.uint8:  # Zero points in bytes stay bytes, too
            zeros = _unpack_rows(zeros.reshape(columns, -1), bits, blocks)
        middle = b.cast(b.hold(zeros.reshape(columns, blocks).T[:, None, None, :]), x.dtype)
    scale = scales.reshape(columns, blocks).T[:, None, None, :].astype(x.dtype)
    real = b("Mul", b("Sub", b.cast(weights, x.dtype), middle), b.hold(scale))
    whole = pad_axis(b, x, x.rank - 1, 0, blocks * block - terms)
    return plus(b, matmul(b, whole, reshape(b, real, [blocks * block, columns])), c.opt(5))


@rule("GatherBlockQuantized", domain=DOMAIN)
def gather_block_quantised(b: Builder, c: NodeCall) -> Value:
    """Slices of a constant table of 2, 4 or 8 bits, which stays packed; out of range they are zeros."""
    block, typed = c.integer("block_size", 128), c.x(0).dtype.name
    table, zero = _in_bytes(b, c.x(0)), c.opt(3) and _in_bytes(b, c.x(3))
    if table.dtype != np.uint8 or table.data is None or (zero is not None and zero.dtype != np.uint8):
        raise NodeRefused(f"its table is of {typed}, or no constant; give one of 4 bits or uint8")
    axis, along = (
        normal_axis(c.integer(name, default), table.rank)
        for name, default in (("gather_axis", 0), ("quantize_axis", 1))
    )
    bits, last = 4 if typed in _FOUR_BITS else c.integer("bits", 4), table.rank - 1
    if bits not in _FEW_BITS or block < _LEAST_BLOCK or axis or along != last or not last:
        raise NodeRefused(f"its {bits} bits in blocks of {block} along axis {along} are not supported")
    extent, scale = table.shape[0], c.x(2)
    places = b("Min", b("Max", wrap_indices(b, c.x(1), extent), 0), extent - 1)

    def rows(v: Value) -> Value:
        return b("Gather", b.hold(v.data) if v.data is not None else v, places, axis=0)

    packed, scales = rows(table), rows(scale)
    numbers = _unpack(b, with_axis(b, packed, packed.rank), bits, axis=packed.rank)
    count = scales.shape[-1]
    width = table.shape[-1] * (8 // bits)
    if count * block != width:
        raise NodeRefused(f"its rows of {width} numbers are not whole blocks of {block}")
    shape = [*packed.shape[:-1], count, block]
    middle: Value = b.like(_FOUR_BITS.get(typed, 1 << (bits - 1)), scales)
    if zero is not None:
        given = rows(zero)
        unpacked = _unpack(b, with_axis(b, given, given.rank), bits, axis=given.rank)
        unpacked = reshape(b, unpacked, [*given.shape[:-1], given.shape[-1] * (8 // bits)])
        middle = with_axis(b, b.cast(cut(b, unpacked, given.rank - 1, 0, count), scales.dtype), given.rank)
    real = b("Sub", b.cast(reshape(b, numbers, shape), scales.dtype), middle)
    found = reshape(b, b("Mul", real, with_axis(b, scales, scales.rank)), [*packed.shape[:-1], width])
    known = b("And", b("LessOrEqual", -extent, c.x(1)), b("Less", c.x(1), extent))
    return b("Where", reshape(b, known, [*c.x(1).shape, *[1] * last]), found, 0)


def _in_bytes(b: Builder, v: Value) -> Value:
    """Return a constant of 4-bit numbers as bytes of two each, along the last axis; else the value."""
    if v.data is None or v.dtype.name not in _FOUR_BITS:
        return v
    numbers = (v.data.astype(np.int8) + _FOUR_BITS[v.dtype.name]).astype(np.uint8)
    even = np.pad(numbers, [(0, 0)] * (v.rank - 1) + [(0, v.shape[-1] % 2)])
    return b.constant(even[..., ::2] | even[..., 1::2] << 4)


def _unpack(b: Builder, packed: Array | Value, bits: int, axis: int) -> Value:
    """Return the numbers in bytes or words; those of one lie along an axis of 1, which becomes as long."""
    held = packed if isinstance(packed, Value) else b.hold(packed)
    width = 8 * held.dtype.itemsize
    if bits == width:
        return held
    shape = [1] * held.rank
    shape[axis] = width // bits
    shifts = b.constant(np.arange(0, width, bits, dtype=held.dtype).reshape(shape))
    return b("BitwiseAnd", b("BitShift", held, shifts, direction="RIGHT"), (1 << bits) - 1)


def _unpack_rows(packed: Array, bits: int, count: int) -> Array:
    """Return the first `count` numbers of each row of bytes."""
    each = (packed[:, :, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
    return each.reshape(len(packed), -1)[:, :count]
