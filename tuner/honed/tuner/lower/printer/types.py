"""OpenCL C's types for TVM's element types, and single lanes of vector expressions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tvm import ir, tirx

# ---- OpenCL C's types for TVM's element types ----
#
# A vector of bools is a mask: a vector of signed integers, each 0 or -1, as comparisons of vectors give it
# (OpenCL C 3.0, 6.4.5). How wide its elements are follows from what was compared. In memory a bool is a byte.

Kind = Literal["int", "uint", "float", "bool", "mask"]
LANES = (1, 2, 3, 4, 8, 16)
_INTEGERS = {8: "char", 16: "short", 32: "int", 64: "long"}
_FLOATS = {16: "half", 32: "float", 64: "double"}


class Unprintable(ValueError):
    """OpenCL C has nothing for a part of the kernel; the text says for which."""


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar, or a vector of `lanes` elements of `bits`."""

    kind: Kind
    bits: int
    lanes: int = 1

    @property
    def integer(self) -> bool:
        """Whether its values are integers that count, which bools are not."""
        return self.kind in ("int", "uint")

    @property
    def nbytes(self) -> int:
        """Bytes of one value in memory."""
        return max(self.bits // 8, 1) * self.lanes


INT, UINT, LONG, ULONG = Type("int", 32), Type("uint", 32), Type("int", 64), Type("uint", 64)
BOOL, BYTE = Type("bool", 8), Type("uint", 8)


@cache
def parsed(dtype: str) -> Type:
    """The type that TVM writes so: float32, int8x4, bool."""
    element, _, lanes = dtype.partition("x")
    count = int(lanes or 1)
    if count not in LANES:
        raise Unprintable(f"OpenCL C has no vectors of {count} elements")
    if element in ("bool", "uint1"):
        return BOOL if count == 1 else Type("mask", 32, count)
    for kind in ("uint", "int", "float"):
        bits = element.removeprefix(kind)
        if element.startswith(kind) and bits.isdigit():
            found = Type(kind, int(bits), count)
            name(found)
            return found
    raise Unprintable(f"OpenCL C has no type for {dtype}")


@cache
def name(of: Type) -> str:
    """What OpenCL C calls the type."""
    if of.kind == "bool":
        return "bool"
    names = _FLOATS if of.kind == "float" else _INTEGERS
    if of.bits not in names:
        raise Unprintable(f"OpenCL C has no {of.kind} of {of.bits} bits")
    return ("u" if of.kind == "uint" else "") + names[of.bits] + (str(of.lanes) if of.lanes > 1 else "")


@cache
def vector(of: Type, lanes: int) -> Type:
    """The type of `lanes` such elements."""
    if lanes not in LANES:
        raise Unprintable(f"OpenCL C has no vectors of {lanes} elements")
    return Type("mask" if of.kind == "bool" and lanes > 1 else of.kind, of.bits, lanes)


@cache
def stored(of: Type) -> Type:
    """The type in memory: bools are bytes there."""
    return Type("uint", 8, of.lanes) if of.kind in ("bool", "mask") else of


@cache
def limits(of: Type) -> tuple[int, int]:
    """The least and the greatest integer of a type."""
    if of.kind == "int":
        return -(1 << (of.bits - 1)), (1 << (of.bits - 1)) - 1
    return (0, (1 << of.bits) - 1) if of.kind == "uint" else (0, 1)


# ---- One lane of a vector expression, as an expression of scalars ----

_BINARY = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.Min, tirx.Max, tirx.EQ, tirx.NE, tirx.LT, tirx.LE,
    tirx.GT, tirx.GE, tirx.And, tirx.Or, tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.LShift,
    tirx.RShift,
)  # fmt: skip


def lane(expr: Any, n: int) -> Any:
    """Lane `n` of an index; raises Unprintable where the vector is no sum, product or load of others."""
    if parsed(str(expr.ty.dtype)).lanes == 1:
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
