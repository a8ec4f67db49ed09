"""One lane of a vector expression, as an expression of scalars."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from . import types

_BINARY = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.Min, tirx.Max, tirx.EQ, tirx.NE, tirx.LT, tirx.LE,
    tirx.GT, tirx.GE, tirx.And, tirx.Or, tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.LShift,
    tirx.RShift,
)  # fmt: skip


def lane(expr: Any, n: int) -> Any:
    """Lane `n` of an index; raises Unprintable where the vector is no sum, product or load of others."""
    if types.parsed(str(expr.ty.dtype)).lanes == 1:
        return expr
    if isinstance(expr, tirx.Ramp):
        return expr.base + expr.stride * n
    if isinstance(expr, tirx.Broadcast):
        return expr.value
    if isinstance(expr, _BINARY):
        return type(expr)(lane(expr.a, n), lane(expr.b, n))
    if isinstance(expr, tirx.Cast):
        return tirx.Cast(str(expr.ty.dtype).partition("x")[0], lane(expr.value, n))
    if isinstance(expr, tirx.Select):
        return tirx.Select(lane(expr.condition, n), lane(expr.true_value, n), lane(expr.false_value, n))
    if isinstance(expr, tirx.Not):
        return tirx.Not(lane(expr.a, n))
    if isinstance(expr, ir.TensorLoad) and len(expr.indices) == 1:
        return tirx.BufferLoad(expr.source, [lane(expr.indices[0], n)])
    if isinstance(expr, ir.Call) and str(expr.op.name) == "prim.if_then_else":
        return tirx.if_then_else(*(lane(a, n) for a in expr.args))
    return tirx.Shuffle([expr], [n])
