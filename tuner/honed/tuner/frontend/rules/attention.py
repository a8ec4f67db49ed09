"""Attention as ONNX Runtime's optimiser writes it (com.microsoft): projections, masks, state in one operator.

Shapes are written with B sequences of N heads: S places that ask, L that are new, T with those of the past,
and H numbers a head.
"""

from __future__ import annotations

import math

import numpy as np

from honed.protocol.dataclass import dataclass
from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.call import Call, rule
from honed.tuner.frontend.values import NodeRefused, Value

from .arithmetic import plus
from .layout import cut, join, pick, pieces, reshape, transpose, with_axis
from .linear import matmul
from .quantisation import integer_product, scaled_product

DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What is asked, keys and values: [B, N, S, H], [B, N, T, H] and [B, N, T, H of values].

    `past` of the T places were before what is asked first.
    """

    q: Value
    k: Value
    v: Value
    past: int


def _apart(b: Builder, x: Value, heads: int) -> Value:
    """[B, L, N * H] to [B, N, L, H]."""
    batch, length, width = x.shape
    if heads < 1 or width % heads:
        raise NodeRefused(f"its {heads} heads do not divide {width} numbers")
    return transpose(b, reshape(b, x, [batch, length, heads, width // heads]), [0, 2, 1, 3])


def _mask(b: Builder, c: Call, place: int, heads: Heads) -> Value | None:
    """What a mask adds to scores, to broadcast over [B, N, S, T]; None without one."""
    given = c.opt(place)
    if given is None or (given.rank == 2 and given.shape[1] == 1):
        return None  # a column is the same for all places
    batch, _, asking, _ = heads.q.shape
    total = heads.k.shape[2]
    seen: Value
    if given.shape in ((batch, total), (batch, asking, total)):
        between = 1 if given.rank == 3 else 2
        seen = b("Greater", reshape(b, given, [batch, *[1] * between, *given.shape[1:]]), 0)
    elif given.shape in ((batch,), (2 * batch,)):
        places = b.constant(np.arange(total, dtype=given.dtype))
        ends = reshape(b, cut(b, given, 0, 0, batch), [batch, 1, 1, 1])
        seen = b("Less", places, ends)
        if given.size > batch:
            starts = reshape(b, cut(b, given, 0, batch, 2 * batch), [batch, 1, 1, 1])
            seen = b("And", seen, b("GreaterOrEqual", places, starts))
    else:
        raise NodeRefused(f"its mask of shape {list(given.shape)} is not supported; give one for each place")
    hidden = b.like(c.number("mask_filter_value", -10000.0), heads.q)
    return b("Where", seen, 0, hidden)


def _attend(b: Builder, c: Call, heads: Heads, mask: Value | None, bias: Value | None) -> Value:
    """[B, S, N * H of values]: values averaged by softmax of the scaled products of queries with keys."""
    batch, count, asking, width = heads.q.shape
    total = heads.k.shape[2]
    scale = c.number("scale", 0.0) or 1.0 / math.sqrt(width)
    scores = matmul(b, heads.q, transpose(b, heads.k, [0, 1, 3, 2]))
    scores = b("Mul", scores, scale)
    scores = plus(b, scores, mask, bias)
    if c.integer("unidirectional") and asking > 1:
        before = np.tri(asking, total, heads.past, dtype=np.bool_)
        before[-1] = True  # for ONNX Runtime the last one sees all that there is
        scores = b("Where", b.constant(before), scores, b.constant(np.finfo(scores.dtype).min, scores.dtype))
    shares = b("Softmax", scores, axis=3) if total > 1 else b.constant(np.ones(scores.shape, scores.dtype))
    found = transpose(b, matmul(b, shares, heads.v), [0, 2, 1, 3])
    return reshape(b, found, [batch, asking, count * heads.v.shape[3]])


def _projected(b: Builder, c: Call, whole: Value, mask: int, past: int, bias: int) -> list[Value]:
    """Attention over [B, S, queries, keys and values], and the state."""
    if c.integer("past_present_share_buffer") or c.integer("do_rotary"):
        raise NodeRefused(
            "it keeps its state in a shared buffer, or turns positions itself; export it without that"
        )
    count, sizes = c.integer("num_heads"), c.ints("qkv_hidden_sizes")
    if not sizes:
        sizes = [whole.shape[2] // 3] * 3
    if len(sizes) != 3 or sum(sizes) != whole.shape[2]:
        raise NodeRefused(f"its hidden sizes {sizes} do not make up {whole.shape[2]} columns")
    q, k, v = (_apart(b, part, count) for part in pieces(b, whole, 2, sizes))
    state, new = c.opt(past), k.shape[2]
    if state is not None:
        k, v = (join(b, [pick(b, state, 0, i), side], 2) for i, side in enumerate((k, v)))
    heads = Heads(q=q, k=k, v=v, past=k.shape[2] - new)
    answer = _attend(b, c, heads, _mask(b, c, mask, heads), c.opt(bias) if bias else None)
    if not c.wants(1):
        return [answer]
    return [answer, join(b, [with_axis(b, side, 0) for side in (k, v)], 0)]


@rule("Attention", domain=DOMAIN)
def attention(b: Builder, c: Call) -> list[Value]:
    """One product for queries, keys and values, then attention with masks, bias and past."""
    whole, bias = matmul(b, c.x(0), c.x(1)), c.opt(2)
    if c.opt(6) is not None:
        raise NodeRefused("it keeps its state in a shared buffer; export it without that")
    return _projected(b, c, plus(b, whole, bias), mask=3, past=4, bias=5)


@rule("QAttention", domain=DOMAIN)
def quantised_attention(b: Builder, c: Call) -> list[Value]:
    """Attention whose product for queries, keys and values is of 8-bit integers."""
    whole = integer_product(b, c.x(0), c.opt(6), c.x(1), c.opt(7))
    return _projected(b, c, scaled_product(b, whole, c.x(3), c.x(4), c.x(2)), mask=5, past=8, bias=0)


@rule("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(b: Builder, c: Call) -> list[Value]:
    """Attention over separate queries, keys and values, with masks, bias and past."""
    count = c.integer("num_heads")
    q, k, v, bias = c.x(0), c.opt(1), c.opt(2), c.opt(3)
    if q.rank != 3 or k is None or v is None or k.rank == 5:
        raise NodeRefused("its queries, keys and values are in one tensor; export them apart")
    if c.opt(8) is not None or c.opt(9) is not None:
        raise NodeRefused("it keeps its state in a shared buffer; export it without that")
    if c.wants(3):
        raise NodeRefused("its scores are wanted; export the model without ONNX Runtime's fusions")
    if bias is not None:
        if k.rank == 4:
            raise NodeRefused("it has a bias for keys that are laid out already")
        sizes = [q.shape[2], k.shape[2], v.shape[2]]
        q, k, v = (b("Add", x, part) for x, part in zip((q, k, v), pieces(b, bias, 0, sizes), strict=True))
    k, v = (x if x.rank == 4 else _apart(b, x, count) for x in (k, v))
    new = k.shape[2]
    past = c.opt(6), c.opt(7)
    k, v = (x if old is None else join(b, [old, x], 2) for old, x in zip(past, (k, v), strict=True))
    heads = Heads(q=_apart(b, q, count), k=k, v=v, past=k.shape[2] - new)
    return [_attend(b, c, heads, _mask(b, c, 4, heads), c.opt(5)), heads.k, heads.v]


@rule("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(b: Builder, c: Call) -> Value:
    """Pairs of elements rotated by the angle of their position; other elements are unchanged."""
    if c.integer("is_packed_batching"):
        raise NodeRefused("its sequences are packed together; export it without that")
    x, positions, cosines, sines = (c.x(i) for i in range(4))
    half = cosines.shape[1]
    given, count = c.integer("rotary_embedding_dim"), c.integer("num_heads")
    if x.rank == 3:
        _, length, width = x.shape
        size = width // count if given and count else 2 * half
        apart = _apart(b, x, width // size)
    else:
        _, _, length, size = x.shape
        apart = x
    if 2 * half > size or (given and given != 2 * half):
        raise NodeRefused(f"its cosines for {half} pairs do not fit heads of {size} numbers")
    if positions.size == 1:
        first = reshape(b, positions, [1])
        positions = b("Add", first, b.constant(np.arange(length), positions.dtype))
    places = reshape(b, positions, [positions.size // length, 1, length])
    # [B or 1, 1, L, half]
    cosine, sine = (b("Gather", table, places, axis=0) for table in (cosines, sines))
    turned = _turned(
        b, cut(b, apart, 3, 0, 2 * half), cosine, sine, interleaved=bool(c.integer("interleaved"))
    )
    whole = turned if 2 * half == size else join(b, [turned, cut(b, apart, 3, 2 * half, size)], 3)
    return whole if x.rank == 4 else reshape(b, transpose(b, whole, [0, 2, 1, 3]), x.shape)


def _turned(b: Builder, x: Value, cosine: Value, sine: Value, *, interleaved: bool) -> Value:
    """Pairs along the last axis: neighbours, or one of each half."""
    *outer, width = x.shape
    half = width // 2
    pairs = reshape(b, x, [*outer, half, 2] if interleaved else [*outer, 2, half])
    axis = len(outer) + (1 if interleaved else 0)
    first, second = pick(b, pairs, axis, 0), pick(b, pairs, axis, 1)
    low = b("Sub", b("Mul", first, cosine), b("Mul", second, sine))
    high = b("Add", b("Mul", second, cosine), b("Mul", first, sine))
    if not interleaved:
        return join(b, [low, high], len(outer))
    return reshape(b, join(b, [with_axis(b, v, axis) for v in (low, high)], axis), x.shape)
