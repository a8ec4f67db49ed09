"""Represents pieces of C: a text with its type, precedence, the block of its variables, and its bounds.

Indices are sums of them: a constant and multiples of indivisible terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from tvm import ir, tirx

# A vector of bools is a mask: a vector of signed integers, each 0 or -1, as comparisons of vectors give it
# (OpenCL C 3.0, 6.4.5). The width of its elements follows from the compared operands. In memory a bool is a
# byte.

Kind = Literal["int", "uint", "float", "bool", "mask"]
LANES = (1, 2, 3, 4, 8, 16)
_INTEGERS = {8: "char", 16: "short", 32: "int", 64: "long"}
_FLOATS = {16: "half", 32: "float", 64: "double"}
TERNARY, OR, AND, BIT_OR, BIT_XOR, BIT_AND, EQUAL, LESS, SHIFT, ADD, MUL, UNARY, PRIMARY = range(3, 16)
_FLOAT_SUFFIX = {16: "f", 32: "f", 64: ""}  # Suffixes of literals, by bits
_MIXED = (BIT_OR, BIT_XOR, BIT_AND, SHIFT)
_BINARY = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.Min, tirx.Max, tirx.EQ, tirx.NE, tirx.LT, tirx.LE,
    tirx.GT, tirx.GE, tirx.And, tirx.Or, tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.LShift,
    tirx.RShift,
)  # fmt: skip


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
        """Return whether its values are integers; bools are not."""
        return self.kind in ("int", "uint")

    @property
    def nbytes(self) -> int:
        """Bytes of one value in memory."""
        return max(self.bits // 8, 1) * self.lanes


INT, UINT, LONG, ULONG = Type("int", 32), Type("uint", 32), Type("int", 64), Type("uint", 64)
BOOL = Type("bool", 8)
_SUFFIXES = {INT: "", UINT: "u", LONG: "L", ULONG: "UL"}  # Suffixes of literals


@cache
def parse_type(dtype: str) -> Type:
    """Return the type that TVM writes as `dtype`: float32, int8x4, bool.

    Raises Unprintable where OpenCL C lacks it.
    """
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


def type_of(expr: Any) -> Type:
    """Return the type of an expression of TIR."""
    return parse_type(str(expr.ty.dtype))


@cache
def name(of: Type) -> str:
    """Return the name of the type in OpenCL C; raise Unprintable where it has none."""
    if of.kind == "bool":
        return "bool"
    names = _FLOATS if of.kind == "float" else _INTEGERS
    if of.bits not in names:
        raise Unprintable(f"OpenCL C has no {of.kind} of {of.bits} bits")
    return ("u" if of.kind == "uint" else "") + names[of.bits] + (str(of.lanes) if of.lanes > 1 else "")


@cache
def vector(of: Type, lanes: int) -> Type:
    """Return the type of `lanes` elements of a type; raise Unprintable where OpenCL C has no such vector."""
    if lanes not in LANES:
        raise Unprintable(f"OpenCL C has no vectors of {lanes} elements")
    return Type("mask" if of.kind == "bool" and lanes > 1 else of.kind, of.bits, lanes)


@cache
def type_in_memory(of: Type) -> Type:
    """Return the type in memory: bools are stored as bytes."""
    return Type("uint", 8, of.lanes) if of.kind in ("bool", "mask") else of


@cache
def comparison_type(of: Type) -> Type:
    """Return the result type of comparisons of such values."""
    return BOOL if of.lanes == 1 else Type("mask", of.bits, of.lanes)


@cache
def limits(of: Type) -> tuple[int, int]:
    """Return the least and the greatest integer of a type."""
    if of.kind == "int":
        return -(1 << (of.bits - 1)), (1 << (of.bits - 1)) - 1
    return (0, (1 << of.bits) - 1) if of.kind == "uint" else (0, 1)


def lane(expr: Any, n: int) -> Any:
    """Return lane `n` of an index.

    Raises Unprintable where the vector is no sum, product or load of others.
    """
    if type_of(expr).lanes == 1:
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


@dataclass(frozen=True, slots=True)
class Term:
    """An expression of C.

    `home` is the deepest open block that one of its variables belongs to (0 is the kernel's own). Only a
    `pure` term has one meaning, and cannot fail, wherever its variables exist: it reads no memory. Integers
    lie between `low` and `high`.
    """

    text: str
    type: Type
    level: int = PRIMARY
    home: int = 0
    pure: bool = True
    low: int | None = None
    high: int | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value an integer can have."""
        least, most = limits(self.type)
        return (least if self.low is None else self.low), (most if self.high is None else self.high)

    @property
    def simple(self) -> bool:
        """Return whether it is a name or a number, perhaps converted: there is no work to share."""
        return self.level == PRIMARY and "(" not in self.text

    def within(self, level: int) -> str:
        """Return the text as an operand of an operator of that precedence."""
        if level in _MIXED:  # C's own rules for these are easily misread, and compilers warn
            return self.text if self.level >= UNARY else f"({self.text})"
        if self.level >= max(level, ADD) or (level == AND and self.level in (AND, LESS, EQUAL)):
            return self.text
        if level in (TERNARY, OR) and self.level in (LESS, EQUAL, level):
            return self.text
        return f"({self.text})"


def with_bounds(term: Term, low: int, high: int) -> Term:
    """Return the term with the bounds of its value, unless it may wrap."""
    least, most = limits(term.type)
    return replace(term, low=low, high=high) if least <= low and high <= most else term


def number(value: int, of: Type) -> Term:
    """Return an integer literal of a type."""
    level = PRIMARY if value >= 0 and of.bits >= 32 else UNARY
    return Term(_literal(value, of), of, level, low=value, high=value)


def _literal(value: int, of: Type) -> str:
    if of in _SUFFIXES:
        suffix = _SUFFIXES[of]
        # The digits of the least integer alone are no literal of the type
        least = of.kind == "int" and value == limits(of)[0]
        return f"({value + 1}{suffix} - 1)" if least else f"{value}{suffix}"
    return f"({name(of)}){value}" if value >= 0 else f"({name(of)})({value})"


def floating(value: float, of: Type) -> Term:
    """Return a literal that is read back exactly; halves are written as singles, which hold them."""
    cast = "" if of.bits == 32 else f"({name(of)})"
    if math.isnan(value):
        return Term(f"{cast}NAN", of, UNARY if cast else PRIMARY)
    if math.isinf(value):
        return Term(f"{cast}{'-' if value < 0 else ''}INFINITY", of, UNARY)
    rounded = float(value) if of.bits == 64 else np.float32(np.float16(value) if of.bits == 16 else value)
    if not math.isinf(rounded):
        sign = math.copysign(1.0, float(rounded)) < 0
        text = f"{'' if of.bits == 64 else cast}{rounded!s}{_FLOAT_SUFFIX[of.bits]}"
        return Term(text, of, UNARY if sign or of.bits == 16 else PRIMARY)
    return floating(math.inf if value > 0 else -math.inf, of)


def decide(sign: str, a: Term, b: Term) -> bool | None:
    """Return the result of a comparison of integers where their bounds determine it, else None."""
    (al, ah), (bl, bh) = a.bounds, b.bounds
    if sign in (">", ">="):
        return decide("<" if sign == ">" else "<=", b, a)
    if sign == "<":
        return True if ah < bl else False if al >= bh else None
    if sign == "<=":
        return True if ah <= bl else False if al > bh else None
    if ah < bl or bh < al:
        return sign == "!="
    return sign == "==" if al == ah == bl == bh else None


def bounds(sign: str, a: Term, b: Term) -> tuple[int, int] | None:
    """Return the bounds of a result, or None where they do not follow from those of the operands."""
    (al, ah), (bl, bh) = a.bounds, b.bounds
    if sign == "+":
        return al + bl, ah + bh
    if sign == "-":
        return al - bh, ah - bl
    if sign == "*":
        ends = (al * bl, al * bh, ah * bl, ah * bh)
        return min(ends), max(ends)
    if sign == "&" and (bl >= 0 or al >= 0):
        return 0, min(h for low, h in ((al, ah), (bl, bh)) if low >= 0)
    if bl != bh or bl <= 0:
        return (0, max(ah, bl)) if sign == "/" and al >= 0 and bl > 0 else None
    if sign == "/":
        return -(-al // bl) if al < 0 else al // bl, ah // bl if ah >= 0 else -(-ah // bl)
    if sign == "%" and al >= 0 and (al == ah or ah < bl):
        return al % bl, ah % bl
    if sign == "%":
        return (0 if al >= 0 else 1 - bl), min(ah, bl - 1) if al >= 0 else bl - 1
    if sign == ">>" and bl < 64:
        return al >> bl, ah >> bl
    return None


@dataclass(frozen=True, slots=True)
class LinearForm:
    """`constant` + the sum of factor * term; terms are distinct by their text."""

    terms: dict[str, tuple[Term, int]]
    constant: int = 0

    @staticmethod
    def of(term: Term) -> LinearForm:
        """Return a linear form of a single term."""
        return LinearForm({term.text: (term, 1)})

    def plus(self, other: LinearForm, factor: int = 1) -> LinearForm:
        """Return the sum of both, with `other` multiplied by `factor`."""
        terms = dict(self.terms)
        for text, (term, times) in other.terms.items():
            total = terms[text][1] + factor * times if text in terms else factor * times
            if total:
                terms[text] = (term, total)
            else:
                del terms[text]
        return LinearForm(terms, self.constant + factor * other.constant)

    def times(self, factor: int) -> LinearForm:
        """Return the linear form multiplied by `factor`."""
        if factor == 0:
            return LinearForm({})
        return LinearForm(
            {t: (term, n * factor) for t, (term, n) in self.terms.items()}, self.constant * factor
        )

    def multiple(self) -> int:
        """Return the greatest number that provably divides the value; 0 divides only 0."""
        return math.gcd(self.constant, *(factor for _, factor in self.terms.values()))

    def products(self) -> Iterator[tuple[int, int]]:
        """Yield the least and the greatest value of each factor * term."""
        for term, factor in self.terms.values():
            low, high = term.bounds
            yield (factor * low, factor * high) if factor > 0 else (factor * high, factor * low)
