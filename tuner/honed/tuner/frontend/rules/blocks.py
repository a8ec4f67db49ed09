"""Weights of few bits in blocks that share a scale, as language models have them (com.microsoft).

They stay packed in the compiled file, with the lowest bits of a byte first. The nodes that unpack them are
part of the graph; the lowering fuses them with the product that reads it.
"""

from __future__ import annotations

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import Array, NodeCall, NodeRefused, Value, normal_axis

from .arithmetic import plus
from .indexing import wrap_indices
from .layout import cut, pad_axis, reshape, with_axis
from .linear import matmul

DOMAIN = "com.microsoft"
_BITS = (2, 4, 8)
_FOUR_BITS = {
    "uint4": 0,
    "int4": 8,
}  # Types of numbers of 4 bits, with the addend that makes all of them positive or 0
_LEAST_BLOCK = 16


@rule("MatMulNBits", domain=DOMAIN)
def matmul_few_bits(b: Builder, c: NodeCall) -> Value:
    """A product with constant weights of 2, 4 or 8 bits, which stay packed; its input is never quantised."""
    bits, block = c.integer("bits", 4), c.integer("block_size")
    terms, columns = c.integer("K"), c.integer("N")
    if bits not in _BITS or block < _LEAST_BLOCK or columns < 1 or terms < 1:
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
            zeros = _numbers(zeros.reshape(columns, -1), bits, blocks)
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
    if bits not in _BITS or block < _LEAST_BLOCK or axis or along != last or not last:
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


def _numbers(packed: Array, bits: int, count: int) -> Array:
    """Return the first `count` numbers of each row of bytes."""
    each = (packed[:, :, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
    return each.reshape(len(packed), -1)[:, :count]
