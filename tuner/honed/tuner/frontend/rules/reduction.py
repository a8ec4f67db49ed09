"""Reductions along axes, and searches for an extreme."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.call import Call, normal_axis, rule
from honed.tuner.frontend.values import NodeRefused, Value, elem_type

from .layout import backwards, given_axes, without_axes

_AXES_INPUT_SINCE = {"ReduceSum": 13}  # the others took axes as an input at 18


def reduce(b: Builder, op: str, x: Value, axes: list[int], *, keepdims: bool = True) -> Value:
    """A reduction of the core set; axes count from the front."""
    if all(x.shape[a] == 1 for a in axes):
        return x if keepdims else without_axes(b, x, axes)
    return b(op, x, b.ints(*axes), keepdims=int(keepdims))


def _axes(c: Call, rank: int) -> list[int] | None:
    """Sorted axes; None where nothing is to be reduced."""
    axes = given_axes(c, _AXES_INPUT_SINCE.get(c.op, 18))
    if not axes:
        return None if c.integer("noop_with_empty_axes") and c.opset >= 13 else list(range(rank))
    return sorted(normal_axis(a, rank) for a in axes)


@rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
def plain(b: Builder, c: Call) -> Value:
    """Reductions that the core set has."""
    x = c.x()
    axes = _axes(c, x.rank)
    if not axes:
        return x
    wide = b.cast(x, np.int32) if x.dtype.kind == "b" else x
    return b.cast(reduce(b, c.op, wide, axes, keepdims=bool(c.integer("keepdims", 1))), x.dtype)


@rule("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
def composed(b: Builder, c: Call) -> Value:
    """Sums of something, then a function of the sum; applied also where no axis is reduced."""
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
    """The largest element is taken out first, so that exp cannot overflow; infinities are left in."""
    if not x.is_float:
        raise NodeRefused(f"it works on {x.dtype.name}; cast to a floating point type first")
    most = float(np.finfo(x.dtype).max)
    top = b("Min", b("Max", reduce(b, "ReduceMax", x, axes), -most), most)
    total = reduce(b, "ReduceSum", b("Exp", b("Sub", x, top)), axes)
    result = b("Add", b("Log", total), top)
    return result if keep else without_axes(b, result, axes)


@rule("ArgMax", "ArgMin")
def arg_extreme(b: Builder, c: Call) -> Value:
    """Place of the first extreme, or of the last; NaN is none."""
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
