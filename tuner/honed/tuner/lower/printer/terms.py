"""Pieces of C: a text with its type, its precedence, where its variables come from, and what it can be.

Indices are sums of them: a constant and multiples of what cannot be taken apart further.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from . import types
from .types import Type

TERNARY, OR, AND, BIT_OR, BIT_XOR, BIT_AND, EQUAL, LESS, SHIFT, ADD, MUL, UNARY, PRIMARY = range(3, 16)
_SUFFIX = {16: "f", 32: "f", 64: ""}  # of literals, by bits
_MIXED = (BIT_OR, BIT_XOR, BIT_AND, SHIFT)


@dataclass(frozen=True, slots=True)
class Term:
    """An expression of C.

    `home` is the deepest open block that one of its variables belongs to (0 is the kernel's own). Only a
    `pure` term means the same, and cannot fail, wherever its variables exist: it reads no memory.
    Integers lie between `low` and `high`.
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
        least, most = types.limits(self.type)
        return (least if self.low is None else self.low), (most if self.high is None else self.high)

    @property
    def simple(self) -> bool:
        """Whether it is a name or a number, perhaps converted: no work to be kept."""
        return self.level == PRIMARY and "(" not in self.text

    def within(self, level: int) -> str:
        """The text as an operand of an operator of that precedence."""
        if level in _MIXED:  # C's own rules for these are easily misread, and compilers warn
            return self.text if self.level >= UNARY else f"({self.text})"
        if self.level >= max(level, ADD) or (level == AND and self.level in (AND, LESS, EQUAL)):
            return self.text
        if level in (TERNARY, OR) and self.level in (LESS, EQUAL, level):
            return self.text
        return f"({self.text})"


def bounded(term: Term, low: int, high: int) -> Term:
    """The term with what is known of its value, unless it may wrap."""
    least, most = types.limits(term.type)
    return replace(term, low=low, high=high) if least <= low and high <= most else term


def number(value: int, of: Type) -> Term:
    """An integer literal of a type."""
    level = PRIMARY if value >= 0 and of.bits >= 32 else UNARY
    return Term(_literal(value, of), of, level, low=value, high=value)


def _literal(value: int, of: Type) -> str:
    if of == types.INT:
        return str(value) if value > -(1 << 31) else "(-2147483647 - 1)"
    if of == types.UINT:
        return f"{value}u"
    if of == types.LONG:
        return f"{value}L" if value > -(1 << 63) else "(-9223372036854775807L - 1)"
    if of == types.ULONG:
        return f"{value}UL"
    return f"({types.name(of)}){value}" if value >= 0 else f"({types.name(of)})({value})"


def floating(value: float, of: Type) -> Term:
    """A literal that is read back as exactly the number; halves are written as singles, which hold them."""
    cast = "" if of.bits == 32 else f"({types.name(of)})"
    if math.isnan(value):
        return Term(f"{cast}NAN", of, UNARY if cast else PRIMARY)
    if math.isinf(value):
        return Term(f"{cast}{'-' if value < 0 else ''}INFINITY", of, UNARY)
    rounded = float(value) if of.bits == 64 else np.float32(np.float16(value) if of.bits == 16 else value)
    if not math.isinf(rounded):
        sign = math.copysign(1.0, float(rounded)) < 0
        text = f"{'' if of.bits == 64 else cast}{rounded!s}{_SUFFIX[of.bits]}"
        return Term(text, of, UNARY if sign or of.bits == 16 else PRIMARY)
    return floating(math.inf if value > 0 else -math.inf, of)


def decided(sign: str, a: Term, b: Term) -> bool | None:
    """What a comparison of integers gives, where their bounds tell."""
    (al, ah), (bl, bh) = a.bounds, b.bounds
    if sign in (">", ">="):
        return decided("<" if sign == ">" else "<=", b, a)
    if sign == "<":
        return True if ah < bl else False if al >= bh else None
    if sign == "<=":
        return True if ah <= bl else False if al > bh else None
    if ah < bl or bh < al:
        return sign == "!="
    return sign == "==" if al == ah == bl == bh else None


def bounds(sign: str, a: Term, b: Term) -> tuple[int, int] | None:
    """The bounds of a result, where they follow from those of the operands."""
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
    """`constant` + the sum of factor * term; terms are told apart by their text."""

    terms: dict[str, tuple[Term, int]]
    constant: int = 0

    @staticmethod
    def of(term: Term) -> LinearForm:
        """A single term."""
        return LinearForm({term.text: (term, 1)})

    def plus(self, other: LinearForm, factor: int = 1) -> LinearForm:
        """The sum of both, `other` multiplied."""
        terms = dict(self.terms)
        for text, (term, times) in other.terms.items():
            total = terms[text][1] + factor * times if text in terms else factor * times
            if total:
                terms[text] = (term, total)
            else:
                del terms[text]
        return LinearForm(terms, self.constant + factor * other.constant)

    def times(self, factor: int) -> LinearForm:
        """A multiple."""
        if factor == 0:
            return LinearForm({})
        return LinearForm(
            {t: (term, n * factor) for t, (term, n) in self.terms.items()}, self.constant * factor
        )

    def multiple(self) -> int:
        """The greatest number that provably divides the value; 0 divides only 0."""
        return gcd(self.constant, *(factor for _, factor in self.terms.values()))

    def products(self) -> Iterator[tuple[int, int]]:
        """The least and the greatest value of each factor * term."""
        for term, factor in self.terms.values():
            low, high = term.bounds
            yield (factor * low, factor * high) if factor > 0 else (factor * high, factor * low)

    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value of the sum."""
        products = list(self.products())
        return self.constant + sum(p[0] for p in products), self.constant + sum(p[1] for p in products)
