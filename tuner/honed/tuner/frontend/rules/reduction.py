"""Rewriting rules of reductions along axes, searches for an extreme, softmax and normalisations."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import NodeCall, NodeRefused, Value, elem_type, normal_axis

from .arithmetic import mix, plus
from .layout import along, axes_of, backwards, cut, flatten_at, pad_axis, reshape, without_axes

_AXES_INPUT_SINCE = {"ReduceSum": 13}  # The others took axes as an input at 18


def reduce(b: Builder, op: str, x: Value, axes: list[int], *, keepdims: bool = True) -> Value:
    """A reduction of the core set; axes count from the front."""
    if all(x.shape[a] == 1 for a in axes):
        return x if keepdims else without_axes(b, x, axes)
    return b(op, x, b.ints(*axes), keepdims=int(keepdims))


def _axes(c: NodeCall, rank: int) -> list[int] | None:
    """Sorted axes; None where nothing is to be reduced."""
    axes = axes_of(c, _AXES_INPUT_SINCE.get(c.op, 18))
    if not axes:
        return None if c.integer("noop_with_empty_axes") and c.opset >= 13 else list(range(rank))
    return sorted(normal_axis(a, rank) for a in axes)


@rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
def plain(b: Builder, c: NodeCall) -> Value:
    """A reduction along axes."""
    x = c.x()
    axes = _axes(c, x.rank)
    if not axes:
        return x
    wide = b.cast(x, np.int32) if x.dtype.kind == "b" else x
    return b.cast(reduce(b, c.op, wide, axes, keepdims=bool(c.integer("keepdims", 1))), x.dtype)


@rule("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
def compose(b: Builder, c: NodeCall) -> Value:
    """A sum and elementwise functions."""
    x = c.x()
    axes = _axes(c, x.rank) or []
    keep = bool(c.integer("keepdims", 1))
    if c.op == "ReduceLogSumExp":
        return _log_sum_exp(b, x, axes, keep=keep)
    if c.op == "ReduceL1":
        x = b("Abs", x)
    elif c.op in ("ReduceL2", "ReduceSumSquare"):
        x = b("Mul", x, x)
    total = reduce(b, "ReduceSum", x, axes, keepdims=keep)
    after = {"ReduceL2": "Sqrt", "ReduceLogSum": "Log"}.get(c.op)
    if after is None:
        return total
    if total.is_float:
        return b(after, total)
    return b("Cast", b(after, b("Cast", total, to=TensorProto.DOUBLE)), to=elem_type(total.dtype))


def _log_sum_exp(b: Builder, x: Value, axes: list[int], *, keep: bool) -> Value:
    """Return the result; the largest element is subtracted first, so that exp cannot overflow.

    Infinities stay.
    """
    if not x.is_float:
        raise NodeRefused(f"it works on {x.dtype.name}; cast to a floating point type first")
    most = float(np.finfo(x.dtype).max)
    top = b("Min", b("Max", reduce(b, "ReduceMax", x, axes), -most), most)
    total = reduce(b, "ReduceSum", b("Exp", b("Sub", x, top)), axes)
    result = b("Add", b("Log", total), top)
    return result if keep else without_axes(b, result, axes)


@rule("ArgMax", "ArgMin")
def arg_extreme(b: Builder, c: NodeCall) -> Value:
    """The index of the first or last extreme; NaN is ignored."""
    x = c.x()
    axis = normal_axis(c.integer("axis"), x.rank)
    if x.shape[axis] == 1:
        kept = x.shape if c.integer("keepdims", 1) else x.shape[:axis] + x.shape[axis + 1 :]
        return b.constant(np.zeros(kept, np.int64))
    attrs = {"axis": axis, "keepdims": c.integer("keepdims", 1)}
    if not c.integer("select_last_index"):
        return b(c.op, x, **attrs)
    last = b.constant(np.array(x.shape[axis] - 1, np.int64))
    return b("Sub", last, b(c.op, backwards(b, x, axis), **attrs))


@rule("Softmax", "LogSoftmax")
def softmax(b: Builder, c: NodeCall) -> Value:
    """Along one axis; below opset 13 along all axes from `axis` on, merged."""
    x = c.x()
    if c.opset >= 13:
        return _softmax(b, c.op, x, normal_axis(c.integer("axis", -1), x.rank))
    axis = normal_axis(c.integer("axis", 1), x.rank, end=True)
    return reshape(b, _softmax(b, c.op, flatten_at(b, x, axis), 1), x.shape)


def _softmax(b: Builder, op: str, x: Value, axis: int) -> Value:
    if x.shape[axis] > 1:
        return b(op, x, axis=axis)
    nought = b("Sub", x, x)  # NaN stays NaN
    return nought if op == "LogSoftmax" else b("Exp", nought)


@rule("Hardmax")
def hardmax(b: Builder, c: NodeCall) -> Value:
    """1 at the first largest element, 0 elsewhere."""
    x = c.x()
    old = c.opset < 13
    axis = normal_axis(c.integer("axis", 1 if old else -1), x.rank, end=old)
    flat, axis = (flatten_at(b, x, axis), 1) if old else (x, axis)
    if flat.shape[axis] == 1:
        return b.constant(np.ones(x.shape, x.dtype))
    best = b("ArgMax", flat, axis=axis, keepdims=1)
    places = along(np.arange(flat.shape[axis], dtype=np.int64), axis, flat.rank)
    hit = b("Equal", b.constant(places), best)
    return reshape(b, b("Cast", hit, to=elem_type(x.dtype)), x.shape)


def channelwise(b: Builder, v: Value, rank: int) -> Value:
    """Return one number for each channel, shaped to broadcast over a tensor of `rank` dimensions."""
    return reshape(b, v, [v.size] + [1] * (rank - 2))


def _compute_in_single(b: Builder, x: Value) -> Value:
    return b("Cast", x, to=TensorProto.FLOAT) if x.dtype == np.float16 else x


def moments(b: Builder, x: Value, axes: list[int]) -> tuple[Value, Value]:
    """Return `x` less its mean, and its variance, over axes that are kept with size 1."""
    centred = b("Sub", x, reduce(b, "ReduceMean", x, axes))
    return centred, reduce(b, "ReduceMean", b("Mul", centred, centred), axes)


def standardise(b: Builder, x: Value, axes: list[int], epsilon: float) -> Value:
    """Return `x` with mean 0 and variance 1 over axes, computed in float32 at least."""
    centred, variance = moments(b, _compute_in_single(b, x), axes)
    result = b("Div", centred, b("Sqrt", b("Add", variance, epsilon)))
    return b.cast(result, x.dtype)


@rule("BatchNormalization")
def batch_normalisation(b: Builder, c: NodeCall) -> Value | list[Value]:
    """A factor and an offset for each channel (inference only), folded if constant."""
    x, scale, bias, mean, variance = (c.x(i) for i in range(5))
    if c.opset >= 14 and c.integer("training_mode"):
        return _by_own_statistics(b, c)
    if any(c.wants(i) for i in range(1, 5)):
        raise NodeRefused("it is in training mode; export the model for inference")
    if c.opset < 9 and not c.integer("spatial", 1):
        raise NodeRefused("it normalises every element apart (spatial=0); export with a newer opset")
    wide = [_compute_in_single(b, v) for v in (scale, bias, mean, variance)]
    scale, bias, mean, variance = wide
    inverse = b("Sqrt", b("Add", variance, c.number("epsilon", 1e-5)))
    factor = b("Div", scale, b("Cast", inverse, to=elem_type(scale.dtype)))
    offset = b("Sub", bias, b("Mul", b("Cast", mean, to=elem_type(factor.dtype)), factor))
    if x.rank > 1:
        factor, offset = channelwise(b, factor, x.rank), channelwise(b, offset, x.rank)
    if factor.dtype == np.float32 and x.dtype == np.float16 and factor.data is None:
        result = b("Add", b("Mul", _compute_in_single(b, x), factor), offset)
        return b("Cast", result, to=TensorProto.FLOAT16)
    to = elem_type(x.dtype)
    return b("Add", b("Mul", x, b("Cast", factor, to=to)), b("Cast", offset, to=to))


def _by_own_statistics(b: Builder, c: NodeCall) -> list[Value]:
    """Batch normalisation in training mode: by the data's own moments, which move the running ones."""
    x, scale, bias, mean, variance = (c.x(i) for i in range(5))
    axes = [axis for axis in range(x.rank) if axis != 1]
    wide, momentum = _compute_in_single(b, x), c.number("momentum", 0.9)
    y = b("Mul", standardise(b, x, axes, c.number("epsilon", 1e-5)), channelwise(b, scale, x.rank))
    now = reduce(b, "ReduceMean", wide, axes), moments(b, wide, axes)[1]
    moved = [
        mix(b, old, b("Cast", reshape(b, new, old.shape), to=elem_type(old.dtype)), momentum)
        for old, new in zip((mean, variance), now, strict=True)
    ]
    return [b("Add", y, channelwise(b, bias, x.rank)), *moved]


@rule("InstanceNormalization")
def instance_normalisation(b: Builder, c: NodeCall) -> Value:
    """Over the spatial axes of each channel of each sample."""
    x = c.x()
    y = standardise(b, x, list(range(2, x.rank)), c.number("epsilon", 1e-5))
    return b("Add", b("Mul", y, channelwise(b, c.x(1), x.rank)), channelwise(b, c.x(2), x.rank))


@rule("GroupNormalization")
def group_normalisation(b: Builder, c: NodeCall) -> Value:
    """Over groups of channels; scale and bias are per group at opset 18, per channel from 21."""
    x, groups = c.x(), c.integer("num_groups", 1)
    n, channels = x.shape[:2]
    if groups < 1 or channels % groups:
        raise NodeRefused(f"its {groups} groups do not divide {channels} channels")
    apart = reshape(b, x, [n, groups, channels // groups, *x.shape[2:]])
    y = reshape(b, standardise(b, apart, list(range(2, apart.rank)), c.number("epsilon", 1e-5)), x.shape)
    scale, bias = c.x(1), c.x(2)
    if c.opset < 21:
        each = np.repeat(np.arange(groups), channels // groups)
        scale, bias = (b("Gather", v, b.constant(each), axis=0) for v in (scale, bias))
    return b("Add", b("Mul", y, channelwise(b, scale, x.rank)), channelwise(b, bias, x.rank))


@rule("LayerNormalization")
def layer_normalisation(b: Builder, c: NodeCall) -> list[Value]:
    """LayerNormalization, or its steps if the mean and inverse deviation are outputs, too."""
    x, scale, bias = c.x(0), c.x(1), c.opt(2)
    axis = normal_axis(c.integer("axis", -1), x.rank)
    epsilon = c.number("epsilon", 1e-5)
    whole = scale.shape == x.shape[axis:] and (bias is None or bias.shape == scale.shape)
    if whole and scale.size > 1 and not c.wants(1) and not c.wants(2):
        offset = b.constant(np.zeros(scale.shape, scale.dtype)) if bias is None else bias
        return [b("LayerNormalization", x, scale, offset, axis=axis, epsilon=epsilon)]
    axes = list(range(axis, x.rank))
    wide = _compute_in_single(b, x)
    centred, variance = moments(b, wide, axes)
    deviation = b("Sqrt", b("Add", variance, epsilon))
    y = b("Mul", b("Cast", b("Div", centred, deviation), to=elem_type(x.dtype)), scale)
    y = plus(b, y, bias)
    return [y, reduce(b, "ReduceMean", wide, axes), b("Div", 1, deviation)]


@rule("RMSNormalization", "SimplifiedLayerNormalization")  # The latter is ONNX Runtime's, in ONNX's domain
def rms_normalisation(b: Builder, c: NodeCall) -> Value:
    """`x` over its root mean square, times a scale."""
    x, scale = c.x(0), c.x(1)
    axes = list(range(normal_axis(c.integer("axis", -1), x.rank), x.rank))
    y = over_root_mean_square(b, _compute_in_single(b, x), axes, c.number("epsilon", 1e-5))
    return b("Mul", b.cast(y, x.dtype), scale)


def over_root_mean_square(b: Builder, x: Value, axes: list[int], epsilon: float) -> Value:
    """Return `x` over its root mean square along axes."""
    square = reduce(b, "ReduceMean", b("Mul", x, x), axes)
    return b("Div", x, b("Sqrt", b("Add", square, epsilon)))


@rule("MeanVarianceNormalization")
def mean_variance_normalisation(b: Builder, c: NodeCall) -> Value:
    """(x - mean) / (deviation + 1e-9), ONNX's definition."""
    x = c.x()
    axes = sorted(normal_axis(a, x.rank) for a in (c.ints("axes") or [0, 2, 3]))
    centred, variance = moments(b, x, axes)
    deviation = b("Sqrt", variance)
    return b("Div", centred, b("Add", deviation, 1e-9))


@rule("LpNormalization")
def lp_normalisation(b: Builder, c: NodeCall) -> Value:
    """`x` over its norm along an axis; NaN where the norm is 0, as in ONNX's evaluator."""
    x, order = c.x(), c.integer("p", 2)
    axis = normal_axis(c.integer("axis", -1), x.rank)
    if order not in (1, 2):
        raise NodeRefused(f"its order p = {order} is neither 1 nor 2")
    norm = reduce(b, "ReduceSum", b("Abs", x) if order == 1 else b("Mul", x, x), [axis])
    norm = b("Sqrt", norm) if order == 2 else norm
    return b("Div", x, norm)


@rule("LRN")
def lrn(b: Builder, c: NodeCall) -> Value:
    """`x` / (bias + alpha / size * sum of squares over neighbouring channels) ^ beta."""
    x, size = c.x(), c.integer("size", 1)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    squares = pad_axis(b, b("Mul", x, x), 1, before, after)
    total = b.chain("Add", (cut(b, squares, 1, shift, shift + x.shape[1]) for shift in range(size)))
    scaled = b("Mul", total, c.number("alpha", 1e-4) / size)
    base = b("Add", scaled, c.number("bias", 1.0))
    return b("Div", x, b("Pow", base, c.number("beta", 0.75)))
