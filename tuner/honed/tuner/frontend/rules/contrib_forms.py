"""ONNX Runtime's own forms (com.microsoft) of what ONNX has: other layouts, packed weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.call import RULES, Call, Result, first_tensor, normal_axis, rule
from honed.tuner.frontend.values import Array, NodeRefused, Value

from .contrib import quantised, real
from .layout import pad_rule, reshape, transpose
from .linear import matmul
from .pooling import max_pool
from .quantisation import qlinear_conv, widened

DOMAIN = "com.microsoft"
_NEWEST = 13  # as which an operator is read whose inputs are those of this opset


@rule("DequantizeLinear", "GatherND", "GridSample", "QuantizeLinear", "Range", "Trilu", domain=DOMAIN)
def as_in_onnx(b: Builder, c: Call) -> Result:
    """As ONNX's operator of this name."""
    return RULES["", c.op](b, replace(c, domain="", opset=_NEWEST))


@rule("Pad", domain=DOMAIN)
def pad_microsoft(b: Builder, c: Call) -> Value:
    """As ONNX's Pad; its amounts may be a row."""
    amounts = b.constant(c.const(1, "pads").reshape(-1))
    call = replace(c, domain="", opset=_NEWEST, inputs=(c.x(0), amounts, *c.inputs[2:]))
    return first_tensor(pad_rule(b, call))


@rule("ExpandDims", domain=DOMAIN)
def expand_dims(b: Builder, c: Call) -> Value:
    """Insert a dimension of size 1."""
    x = c.x(0)
    axis = normal_axis(int(c.const(1, "axis").reshape(-1)[0]), x.rank + 1)
    return reshape(b, x, [*x.shape[:axis], 1, *x.shape[axis:]])


@rule("MatMulInteger16", domain=DOMAIN)
def matmul_integer_16(b: Builder, c: Call) -> Value:
    """A product of 16-bit integers in int32."""
    return matmul(b, widened(b, c.x(0), None, 0), widened(b, c.x(1), None, 0))


def _channels_first(b: Builder, x: Value) -> Value:
    return transpose(b, x, [0, x.rank - 1, *range(1, x.rank - 1)])


def _channels_last(b: Builder, x: Value) -> Value:
    return transpose(b, x, [0, *range(2, x.rank), 1])


@rule("QLinearConv", domain=DOMAIN)
def quantised_conv(b: Builder, c: Call) -> Value:
    """As ONNX's QLinearConv; channels may be the last axis."""
    if not c.integer("channels_last"):
        return first_tensor(qlinear_conv(b, c))
    call = replace(c, inputs=(_channels_first(b, c.x(0)), *c.inputs[1:]))
    return _channels_last(b, first_tensor(qlinear_conv(b, call)))


@rule("NhwcMaxPool", domain=DOMAIN)
def max_pool_channels_last(b: Builder, c: Call) -> Value:
    """As ONNX's MaxPool; channels are the last axis."""
    call = replace(c, domain="", opset=_NEWEST, inputs=(_channels_first(b, c.x(0)),))
    return _channels_last(b, first_tensor(max_pool(b, call)))


@rule("QLinearWhere", domain=DOMAIN)
def qlinear_where(b: Builder, c: Call) -> Value:
    """Selection from dequantised tensors, quantised again."""
    x, y = (real(b, c.x(i), c.x(i + 1), c.x(i + 2)) for i in (1, 4))
    chosen = b("Where", b("Cast", c.x(0), to=TensorProto.BOOL), x, y)
    return quantised(b, chosen, c.x(7), c.x(8), c.x(1))


@rule("MatMulNBits", domain=DOMAIN)
def matmul_few_bits(b: Builder, c: Call) -> Value:
    """A product with weights of 2, 4 or 8 bits, which are constants and made floats while compiling."""
    bits, block = c.integer("bits", 4), c.integer("block_size")
    terms, columns = c.integer("K"), c.integer("N")
    if bits not in (2, 4, 8) or block < 16 or columns < 1 or terms < 1:
        raise NodeRefused(f"its weights of {bits} bits in blocks of {block} are not supported")
    if c.integer("accuracy_level") > 3 or c.integer("weight_prepacked") or c.opt(4) is not None:
        raise NodeRefused(
            "it quantises its input, or its weights are ordered for one machine; export it without that"
        )
    blocks = -(-terms // block)
    packed = c.const(1, "weights").reshape(columns * blocks, -1)
    scales = c.const(2, "scales").reshape(columns, blocks, 1)
    values = _unpacked(packed, bits, block).reshape(columns, blocks, block).astype(scales.dtype)
    zero = _zero_points(c, bits, columns, blocks)
    dense = ((values - zero) * scales).reshape(columns, blocks * block)[:, :terms]
    y, bias = matmul(b, c.x(0), b.constant(dense.T.astype(c.x(0).dtype))), c.opt(5)
    return y if bias is None else b("Add", y, bias)


def _unpacked(packed: Array, bits: int, count: int) -> Array:
    """The first `count` numbers of each row, the lowest bits of a byte first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    each = (packed[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)
    return each.reshape(packed.shape[0], -1)[:, :count]


def _zero_points(c: Call, bits: int, columns: int, blocks: int) -> Array:
    """[columns, blocks, 1]: as packed as the weights, or of their scales' type."""
    given = c.opt_const(3, "zero points")
    if given is None:
        return np.array(1 << (bits - 1)).astype(c.x(2).dtype)
    if given.dtype == np.uint8:
        given = _unpacked(given.reshape(columns, -1), bits, blocks)
    return given.reshape(columns, blocks, 1).astype(c.x(2).dtype)
