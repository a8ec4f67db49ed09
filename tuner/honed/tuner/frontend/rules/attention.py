"""Attention: ONNX's, and as ONNX Runtime's optimiser writes it, with projections, masks and state in one.

Shapes are written with B sequences of N heads: S places that ask, L that are new, T with those of the past,
and H numbers a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import NodeCall, NodeRefused, Value, elem_type, numpy_dtype

from .arithmetic import plus
from .layout import cut, expand, join, pad, pad_axis, pick, pieces, reshape, transpose, with_axis
from .linear import matmul
from .quantisation import integer_product, scale_product

DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The queries, keys and values: [B, N, S, H], [B, N, T, H] and [B, N, T, H of values].

    `past` of the T places precede the first query.
    """

    q: Value
    k: Value
    v: Value
    past: int


def _split_heads(b: Builder, x: Value, heads: int) -> Value:
    """Return [B, L, N * H] as [B, N, L, H]."""
    batch, length, width = x.shape
    if heads < 1 or width % heads:
        raise NodeRefused(f"its {heads} heads do not divide {width} numbers")
    size = width // heads
    if length == 1:
        return reshape(b, x, [batch, heads, 1, size])
    return transpose(b, reshape(b, x, [batch, length, heads, size]), [0, 2, 1, 3])


def _together(b: Builder, x: Value, heads: int) -> Value:
    """Return [B, N, L, H], or with groups of heads for N and their rows for L, as [B, L, N * H]."""
    batch, size = x.shape[0], x.shape[-1]
    length = x.size // (batch * heads * size)
    if length > 1:
        x = transpose(b, reshape(b, x, [batch, heads, length, size]), [0, 2, 1, 3])
    return reshape(b, x, [batch, length, heads * size])


def _mask(b: Builder, c: NodeCall, place: int, heads: Heads) -> Value | None:
    """Return the addend of a mask for scores, which broadcasts over [B, N, S, T]; None without a mask."""
    given = c.opt(place)
    if given is None or (given.rank == 2 and given.shape[1] == 1):
        return None  # A column is equal for all places
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


def _attend(b: Builder, c: NodeCall, heads: Heads, mask: Value | None, bias: Value | None) -> Value:
    """Return [B, S, N * H of values]: values averaged by softmax of scaled products of queries with keys."""
    _, _, asking, width = heads.q.shape
    total = heads.k.shape[2]
    scale = c.number("scale", 0.0) or 1.0 / math.sqrt(width)
    scores = matmul(b, heads.q, transpose(b, heads.k, [0, 1, 3, 2]))
    scores = b("Mul", scores, scale)
    scores = plus(b, scores, mask, bias)
    if c.integer("unidirectional") and asking > 1:
        before = np.tri(asking, total, heads.past, dtype=np.bool_)
        before[-1] = True  # ONNX Runtime lets the last query attend to all keys
        scores = b("Where", b.constant(before), scores, b.constant(np.finfo(scores.dtype).min, scores.dtype))
    shares = b("Softmax", scores, axis=3) if total > 1 else b.constant(np.ones(scores.shape, scores.dtype))
    return _together(b, matmul(b, shares, heads.v), heads.q.shape[1])


def _project(b: Builder, c: NodeCall, whole: Value, mask: int, past: int, bias: int) -> list[Value]:
    """Return attention over [B, S, queries, keys and values], and the state."""
    if c.integer("past_present_share_buffer") or c.integer("do_rotary"):
        raise NodeRefused(
            "it keeps its state in a shared buffer, or turns positions itself; export it without that"
        )
    count, sizes = c.integer("num_heads"), c.ints("qkv_hidden_sizes")
    if not sizes:
        sizes = [whole.shape[2] // 3] * 3
    if len(sizes) != 3 or sum(sizes) != whole.shape[2]:
        raise NodeRefused(f"its hidden sizes {sizes} do not make up {whole.shape[2]} columns")
    q, k, v = (_split_heads(b, part, count) for part in pieces(b, whole, 2, sizes))
    state, new = c.opt(past), k.shape[2]
    if state is not None:
        k, v = (join(b, [pick(b, state, 0, i), side], 2) for i, side in enumerate((k, v)))
    heads = Heads(q=q, k=k, v=v, past=k.shape[2] - new)
    answer = _attend(b, c, heads, _mask(b, c, mask, heads), c.opt(bias) if bias else None)
    if not c.wants(1):
        return [answer]
    return [answer, join(b, [with_axis(b, side, 0) for side in (k, v)], 0)]


@rule("Attention", domain=DOMAIN)
def attention(b: Builder, c: NodeCall) -> list[Value]:
    """A product for queries, keys and values together, then attention with masks, bias and past."""
    whole, bias = matmul(b, c.x(0), c.x(1)), c.opt(2)
    if c.opt(6) is not None:
        raise NodeRefused("it keeps its state in a shared buffer; export it without that")
    return _project(b, c, plus(b, whole, bias), mask=3, past=4, bias=5)


@rule("QAttention", domain=DOMAIN)
def quantised_attention(b: Builder, c: NodeCall) -> list[Value]:
    """Attention whose product for queries, keys and values is of 8-bit integers."""
    whole = integer_product(b, c.x(0), c.opt(6), c.x(1), c.opt(7))
    return _project(b, c, scale_product(b, whole, c.x(3), c.x(4), c.x(2)), mask=5, past=8, bias=0)


@rule("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(b: Builder, c: NodeCall) -> list[Value]:
    """Attention over separate queries, keys and values, with masks, bias and past."""
    count = c.integer("num_heads")
    q, k, v, bias = c.x(0), c.opt(1), c.opt(2), c.opt(3)
    if q.rank != 3 or k is None or v is None or k.rank == 5:
        raise NodeRefused("its queries, keys and values are in one tensor; export them apart")
    if c.opt(9) is not None:
        raise NodeRefused("it follows beams through its state; export it without that")
    if c.wants(3):
        raise NodeRefused("its scores are wanted; export the model without ONNX Runtime's fusions")
    if bias is not None:
        if k.rank == 4:
            raise NodeRefused("it has a bias for keys that are laid out already")
        sizes = [q.shape[2], k.shape[2], v.shape[2]]
        q, k, v = (b("Add", x, part) for x, part in zip((q, k, v), pieces(b, bias, 0, sizes), strict=True))
    k, v = (x if x.rank == 4 else _split_heads(b, x, count) for x in (k, v))
    new = k.shape[2]
    past = c.opt(6), c.opt(7)
    if c.opt(8) is not None:
        return _over_a_shared_buffer(b, c, _split_heads(b, q, count), (k, v))
    k, v = (x if old is None else join(b, [old, x], 2) for old, x in zip(past, (k, v), strict=True))
    heads = Heads(q=_split_heads(b, q, count), k=k, v=v, past=k.shape[2] - new)
    return [_attend(b, c, heads, _mask(b, c, 4, heads), c.opt(5)), heads.k, heads.v]


def _over_a_shared_buffer(b: Builder, c: NodeCall, q: Value, new: tuple[Value, Value]) -> list[Value]:
    """Return attention over a past of fixed length, whose first `past_sequence_length` rows are valid."""
    past, count = (c.x(6), c.x(7)), c.x(8)
    if c.opt(4) is not None or count.size != 1:
        raise NodeRefused("it has a mask beside a past of fixed length; export it without that")
    first = expand(b, reshape(b, b.cast(count, np.int32), [1, 1]), [q.shape[0], 1])
    cache = _Cache(first=first, length=past[0].shape[2], new=new[0].shape[2], keeps=True)
    b.rely(count, 0, cache.length - cache.new, "lengths of its past")
    if cache.length < cache.new or ((bias := c.opt(5)) is not None and bias.shape[3] != cache.length):
        raise NodeRefused(f"its new rows or its bias do not fit a past of {cache.length} rows")
    k, v = (cache.write(b, old, x) for old, x in zip(past, new, strict=True))
    seen = cache.mask(b, 1, causal=bool(c.integer("unidirectional")))
    mask = b("Where", seen, 0, b.like(float(np.finfo(q.dtype).min) / 2, q))
    open_call = replace(c, attrs=c.attrs | {"unidirectional": 0})
    return [_attend(b, open_call, Heads(q=q, k=k, v=v, past=0), mask, c.opt(5)), k, v]


@rule("GroupQueryAttention", domain=DOMAIN)
def group_query_attention(b: Builder, c: NodeCall) -> list[Value]:
    """Attention of groups of heads that share keys, over a cache which the new keys are written into.

    The cache has as many rows as `total_sequence_length`, or the past where that has more. Where the total is
    an input, it may be what the past has room for, or what makes room where the past has none. The new rows
    of each sample are written behind those that `seqlens_k` says are there. Rows that attend to nothing
    (behind a prompt, out of reach of the window) give 0.
    """
    _refuse_of_groups(c)
    count, few = c.integer("num_heads"), c.integer("kv_num_heads")
    if few < 1 or count % few:
        raise NodeRefused(f"its {count} heads are not shared by {few} heads of keys")
    given = [c.x(0), c.opt(1), c.opt(2)]
    if given[1] is None or given[2] is None:
        size = c.x(0).shape[2] // (count + 2 * few)
        given = [*pieces(b, c.x(0), 2, [count * size, few * size, few * size])]
    q, k, v = (_split_heads(b, x, n) for x, n in zip(given, (count, few, few), strict=True) if x is not None)
    batch, _, asking, width = q.shape
    cache = _Cache.of(b, c, batch, asking)
    if c.integer("do_rotary"):
        positions = c.opt(9)
        if positions is None:
            positions = b("Add", cache.first, b.constant(np.arange(asking, dtype=np.int32)))
        else:
            b.rely(positions, 0, c.x(7).shape[0] - 1, "rows of its tables of angles")
            if cache.is_prompt:  # ONNX Runtime reads only the first position of a prompt
                positions = cut(b, reshape(b, positions, [positions.size]), 0, 0, 1)
        interleaved = bool(c.integer("rotary_interleaved"))
        turn = _turns(b, positions, (c.x(7), c.x(8)), asking, interleaved=interleaved)
        q, k = turn(q), turn(k)
    k, v = (cache.write(b, c.opt(place), new) for place, new in ((3, k), (4, v)))
    group = count // few
    q = reshape(b, q, [batch, few, group * asking, width])
    scores = b("Mul", matmul(b, q, transpose(b, k, [0, 1, 3, 2])), c.number("scale", 0.0) or width**-0.5)
    if cap := c.number("softcap", 0.0):
        scores = b("Mul", b("Tanh", b("Div", scores, cap)), cap)
    bias = _group_bias(b, c.opt(10), scores, few, asking)
    scores = plus(b, scores, bias)
    causal, window = bool(c.integer("causal", 1)), c.integer("local_window_size", -1)
    # ONNX Runtime's flash attention alone places the padding of a prompt outside the window of its last row.
    flash = c.x(0).dtype == np.float32 and not cap and c.opt(11) is None and c.integer("smooth_softmax") <= 0
    seen = cache.mask(b, group, causal=causal, window=window, clipped=not flash)
    hidden = b.constant(np.finfo(scores.dtype).min, scores.dtype)
    scores = b("Where", seen, scores, hidden)
    shares = _shares_beside_sinks(b, c, scores, group)
    if causal and (bias is not None or (window >= 0 and cache.padded)):
        shares = b("Where", b("LessOrEqual", scores, hidden), 0, shares)  # A row may be hidden as a whole
    return [_together(b, matmul(b, shares, v), count), k, v]


def _refuse_of_groups(c: NodeCall) -> None:
    """Raise a refusal of the inputs and attributes of GroupQueryAttention that are not compiled."""
    past = c.opt(3)
    if c.integer("sliding_window_cache"):
        raise NodeRefused("it evicts from its cache; export it with a cache of all positions")
    if (past is not None and past.dtype != c.x(0).dtype) or c.opt(12) is not None or c.opt(13) is not None:
        raise NodeRefused("its cache is quantised; export it with a cache of the type of its queries")
    if c.opt(14) is not None or c.opt(15) is not None:
        raise NodeRefused("it normalises its queries; export the model without that fusion")
    if c.integer("qk_output") or c.wants(3):
        raise NodeRefused("its scores are wanted; export the model without ONNX Runtime's fusions")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """A cache of `length` rows; the first of the `new` rows is written to row `first` [B, 1].

    `last` [B, 1] is the last valid row then, None for the last of the new ones: new rows after it pad a
    prompt.
    """

    first: Value
    length: int
    new: int
    last: Value | None = None
    keeps: bool = False  # The rows after the new ones stay; else they become zeros

    @property
    def is_prompt(self) -> bool:
        """Return whether it is known that no rows precede the new ones."""
        return self.first.data is not None and not self.first.data.any()

    @property
    def padded(self) -> bool:
        """Return whether new rows may follow the last valid one."""
        return self.new > 1 and self.last is not None

    @classmethod
    def of(cls, b: Builder, c: NodeCall, batch: int, new: int) -> _Cache:
        """Return where the cache of a call is written, for requests that fit the cache.

        ONNX Runtime refuses all others except those of a larger cache.
        """
        past, ends, total = c.opt(3), c.x(5), c.x(6)
        if ends.size != batch:
            raise NodeRefused(f"it has {ends.size} lengths for {batch} sequences")
        before = past.shape[2] if past is not None else 0
        known = None if total.data is None else int(total.data.reshape(-1)[0])
        grown = before + new if before < new else before  # Length where the total is an input at run time
        length, whole = max(before, grown if known is None else known), known
        if length < new:
            raise NodeRefused(f"its cache has no room for {new} new rows; give its past that length")
        if known is None:
            # ONNX Runtime accepts several new rows of several sequences only as prompts.
            prompts = batch > 1 and new > 1 and before >= new
            least, most = (new, new) if prompts else (new if before >= new else grown, grown)
            if c.integer("do_rotary"):
                most = min(most, c.x(7).shape[0])
            b.rely(
                total,
                least,
                most,
                f"lengths of a cache of {length} rows",
                must="its total_sequence_length, by which its cache has rows, is computed at run time",
            )
            whole = least if least == most else None
        prompt = whole == new
        b.rely(ends, 0 if prompt else new - 1, length - 1, "rows of its cache")
        last = reshape(b, b.cast(ends, np.int32), [batch, 1])
        first = b("Sub", last, new - 1)
        start = b.constant(np.zeros((batch, 1), np.int32))
        if prompt:  # A prompt begins at 0 as in ONNX Runtime, whatever its padded length
            first = start
        elif whole is None:
            first = b("Where", b("Equal", reshape(b, b.cast(total, np.int32), []), new), start, first)
        return cls(first=first, length=length, new=new, last=last if prompt or whole is None else None)

    def write(self, b: Builder, past: Value | None, new: Value) -> Value:
        """Return [B, N, length, H]: rows of the past, the new ones in their place."""
        batch, _, count, _ = new.shape
        if self.is_prompt and not self.keeps:
            return pad_axis(b, new, 2, 0, self.length - count)
        first = reshape(b, self.first, [batch, 1, 1, 1])
        rows = b.constant(np.arange(self.length, dtype=np.int32).reshape(1, 1, -1, 1))
        offsets = b("Sub", rows, first)
        if count > 1:
            places = b("Min", b("Max", reshape(b, offsets, [batch, self.length]), 0), count - 1)
            each = [
                b("Gather", cut(b, new, 0, i, i + 1), pick(b, places, 0, i), axis=2) for i in range(batch)
            ]
            new = join(b, each, 0)
        begun, ended = b("LessOrEqual", 0, offsets), b("LessOrEqual", count, offsets)
        old: Value | int = 0
        if past is not None and past.size:
            old = pad_axis(b, past, 2, 0, self.length - past.shape[2])
        if self.keeps:
            return b("Where", b("And", begun, b("Not", ended)), new, old)
        return b("Where", begun, b("Where", ended, 0, new), old)

    def mask(self, b: Builder, group: int, *, causal: bool, window: int = -1, clipped: bool = False) -> Value:
        """Return [B, 1, queries of a head of keys, length]: which rows each of them attends to.

        The `window` of queries that pad a prompt ends at its last row where it is `clipped`.
        """
        batch = self.first.shape[0]
        rows = b.constant(np.arange(self.length, dtype=np.int32).reshape(1, 1, 1, -1))
        each = np.tile(np.arange(self.new, dtype=np.int32), group) if causal else np.int32(self.new - 1)
        asks = b("Add", reshape(b, self.first, [batch, 1, 1, 1]), b.constant(np.reshape(each, (1, 1, -1, 1))))
        ends = asks
        if self.last is not None:
            last = reshape(b, self.last, [batch, 1, 1, 1])
            ends = b("Min", asks, last) if causal else last
            asks = ends if clipped else asks
        found = b("LessOrEqual", rows, ends)
        return found if window < 0 else b("And", found, b("Less", b("Sub", asks, window), rows))


def _group_bias(b: Builder, bias: Value | None, scores: Value, few: int, asking: int) -> Value | None:
    """Return the addend for the scores of groups of queries, [B or 1, few or 1, queries, length]."""
    if bias is None:
        return None
    batch, heads, _, length = bias.shape
    if length != scores.shape[3] or bias.shape[2] != asking:
        raise NodeRefused(f"its bias of shape {list(bias.shape)} is not for all of its cache")
    group = scores.shape[2] // asking
    if heads == 1:
        each = expand(b, bias, [batch, group, asking, length])
        return reshape(b, each, [batch, 1, group * asking, length])
    return reshape(b, bias, [batch, few, group * asking, length])


def _shares_beside_sinks(b: Builder, c: NodeCall, scores: Value, group: int) -> Value:
    """Return the softmax of scores, in which a sink, a score without a value, may take a share."""
    batch, few, asking, length = scores.shape
    sink = c.opt(11)
    if sink is None and c.integer("smooth_softmax") <= 0:
        return b("Softmax", scores, axis=3) if length > 1 else b.constant(np.ones(scores.shape, scores.dtype))
    if sink is None:
        sink = b.constant(np.zeros(few * group, scores.dtype))
    each = expand(b, reshape(b, sink, [1, few, group, 1]), [batch, few, group, asking // group])
    with_sink = join(b, [scores, reshape(b, each, [batch, few, asking, 1])], 3)
    return cut(b, b("Softmax", with_sink, axis=3), 3, 0, length)


@rule("Attention")
def attention_of_onnx(b: Builder, c: NodeCall) -> list[Value]:
    """Attention of groups of heads, with scores capped before they are masked.

    Queries that attend to nothing give 0, as in ONNX Runtime; ONNX's evaluator gives NaN. Up to ONNX 1.20
    that, and the operator's text, mask scores before they are capped.
    """
    q, k, v = (
        x if x.rank == 4 else _split_heads(b, x, c.integer(name))
        for x, name in zip((c.x(0), c.x(1), c.x(2)), ("q_num_heads", *["kv_num_heads"] * 2), strict=True)
    )
    past = c.opt(4), c.opt(5)
    before = 0 if past[0] is None else past[0].shape[2]
    k, v = (x if old is None else join(b, [old, x], 2) for old, x in zip(past, (k, v), strict=True))
    batch, count, asking, width = q.shape
    few, total = k.shape[1], k.shape[2]
    if not few or count % few:
        raise NodeRefused(f"its {count} heads are not shared by {few} heads of keys")
    group = count // few
    kept = k, v
    if asking == 1:  # A row of each head of a group is one of a matrix
        q = reshape(b, q, [batch, few, group, width])
    elif group > 1:
        k, v = (_repeat_heads(b, x, group) for x in kept)
    scores = matmul(b, b("Mul", q, c.number("scale", width**-0.5)), transpose(b, k, [0, 1, 3, 2]))
    shown = [scores]  # Candidates by qk_matmul_output_mode
    if cap := c.number("softcap", 0.0):
        scores = b("Mul", b("Tanh", b("Div", scores, cap)), cap)
    shown.append(scores)
    # Shape [.., queries, total], to broadcast over [B, heads, queries, total]
    seen, bias = _attention_mask(b, c, asking, total, before), c.opt(3)
    if bias is not None and bias.dtype.kind == "b":
        bias = None
    hidden = b.like(np.finfo(scores.dtype).min, scores)
    if bias is not None:
        bias = _extend_mask(b, bias, total, -np.inf)
        scores = b("Add", scores, _for_groups(b, bias, scores))
    if seen is not None:
        scores = b("Where", _for_groups(b, seen, scores), scores, hidden)
    shown.append(scores)
    precise = numpy_dtype(c.integer("softmax_precision", elem_type(scores.dtype)))
    if precise.kind != "f":
        raise NodeRefused(f"its softmax is to be computed in {precise.name}, which is not supported")
    wide = b.cast(scores, precise)
    shares = b("Softmax", wide, axis=3) if total > 1 else b.constant(np.ones(scores.shape, precise))
    shares = b.cast(shares, v.dtype)
    if _may_hide(seen, bias, hidden):
        shares = b("Where", b("LessOrEqual", scores, hidden), 0, shares)
    shown.append(shares)
    answer = matmul(b, shares, v)
    whole = [batch, count, asking, v.shape[3]]
    made = reshape(b, answer, whole) if c.x(0).rank == 4 else _together(b, answer, count)
    if not c.wants(3):
        return [made, *kept]
    mode = c.integer("qk_matmul_output_mode")
    if mode not in range(len(shown)):
        raise NodeRefused(f"its qk_matmul_output_mode {mode} does not exist")
    return [made, *kept, reshape(b, shown[mode], [batch, count, asking, total])]


def _attention_mask(b: Builder, c: NodeCall, asking: int, total: int, past: int) -> Value | None:
    """Return which keys each query of ONNX's Attention attends to, except by float masks; None: all."""
    found: list[Value] = []
    mask, filled = c.opt(3), c.opt(6)
    if mask is not None and mask.dtype.kind == "b":
        found.append(_extend_mask(b, mask, total, 0))
    places = b.constant(np.arange(total, dtype=np.int32))
    ends = None
    if filled is not None:
        b.rely(filled, 0, total, "lengths of its keys")
        ends = reshape(b, b.cast(filled, np.int32), [filled.size, 1, 1, 1])
        found.append(b("Less", places, ends))
    if c.integer("is_causal"):
        row = b.constant(np.arange(asking, dtype=np.int32).reshape(-1, 1))
        last = b("Add", row, past if ends is None else b("Sub", ends, asking))
        found.append(b("LessOrEqual", places, last))
    return b.chain("And", found) if found else None


def _extend_mask(b: Builder, mask: Value, total: int, fill: float) -> Value:
    """Return a mask of at least two dimensions extended to the number of keys; additional ones are hidden."""
    mask = reshape(b, mask, [1] * (2 - mask.rank) + list(mask.shape))
    missing = total - mask.shape[-1]
    if missing <= 0:
        return mask
    if mask.dtype.kind != "b":
        return pad(b, mask, [0] * mask.rank, [0] * (mask.rank - 1) + [missing], fill)
    return join(b, [mask, b.constant(np.zeros((*mask.shape[:-1], missing), np.bool_))], mask.rank - 1)


def _repeat_heads(b: Builder, x: Value, times: int) -> Value:
    """Return [B, N, L, H] with each head repeated `times` times in a row."""
    batch, few, length, size = x.shape
    each = expand(b, with_axis(b, x, 2), [batch, few, times, length, size])
    return reshape(b, each, [batch, few * times, length, size])


def _for_groups(b: Builder, mask: Value, scores: Value) -> Value:
    """Return a mask over [B, heads, queries, total] for scores, which may have heads as rows of groups."""
    _, few, rows, total = scores.shape
    if mask.rank > 2 and mask.shape[-3] == few * rows and rows > 1 == mask.shape[-2]:
        return reshape(b, mask, [*mask.shape[:-3], few, rows, total])
    return mask


def _may_hide(seen: Value | None, bias: Value | None, hidden: Value) -> bool:
    """Return whether masks may hide all keys from a query."""
    masks = [each.data for each in (seen, bias) if each is not None]
    known = [each if each.dtype == np.bool_ else each > hidden.data for each in masks if each is not None]
    if len(known) < len(masks):
        return True
    return bool(masks) and not np.any(functools.reduce(np.logical_and, known), axis=-1).all()


@rule("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(b: Builder, c: NodeCall) -> Value:
    """Pairs of elements rotated by the angle of their position; other elements are unchanged."""
    if c.integer("is_packed_batching"):
        raise NodeRefused("its sequences are packed together; export it without that")
    x, positions, cosines, sines = (c.x(i) for i in range(4))
    half = cosines.shape[1]
    given, count = c.integer("rotary_embedding_dim"), c.integer("num_heads")
    apart = x
    if x.rank == 3:
        size = x.shape[2] // count if given and count else 2 * half
        apart = _split_heads(b, x, x.shape[2] // size)
    if given and given != 2 * half:
        raise NodeRefused(f"its cosines for {half} pairs do not fit heads of {apart.shape[3]} numbers")
    length = apart.shape[2]
    ahead = length - 1 if positions.size == 1 else 0
    b.rely(positions, 0, cosines.shape[0] - 1 - ahead, "rows of its tables of angles")
    turn = _turns(b, positions, (cosines, sines), length, interleaved=bool(c.integer("interleaved")))
    whole = turn(apart)
    return whole if x.rank == 4 else _together(b, whole, whole.shape[1])


def _turns(
    b: Builder, positions: Value, tables: tuple[Value, Value], length: int, *, interleaved: bool
) -> Callable[[Value], Value]:
    """Return a function that rotates [B, N, L, H] by the angles of [B or 1, L] positions.

    The positions may be those from a first one on. `tables` are of cosines and sines, a row for each
    position.
    """
    if positions.size == 1:
        first = reshape(b, positions, [1])
        positions = b("Add", first, b.constant(np.arange(length), positions.dtype))
    places = reshape(b, positions, [positions.size // length, 1, length])
    # Shape [B or 1, 1, L, half]
    cosine, sine = (b("Gather", table, places, axis=0) for table in tables)
    width = 2 * cosine.shape[3]

    def turn(x: Value) -> Value:
        size = x.shape[3]
        if width > size:
            raise NodeRefused(f"its cosines for {width // 2} pairs do not fit heads of {size} numbers")
        turned = _rotate(b, cut(b, x, 3, 0, width), cosine, sine, interleaved=interleaved)
        return turned if width == size else join(b, [turned, cut(b, x, 3, width, size)], 3)

    return turn


def _rotate(b: Builder, x: Value, cosine: Value, sine: Value, *, interleaved: bool) -> Value:
    """Return pairs along the last axis rotated: neighbours, or one of each half."""
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
