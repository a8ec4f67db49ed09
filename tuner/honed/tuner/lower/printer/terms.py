"""Pieces of C: a text with its type, its precedence, where its variables come from, and what it can be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import types
from .types import Type

TERNARY, OR, AND, BIT_OR, BIT_XOR, BIT_AND, EQUAL, LESS, SHIFT, ADD, MUL, UNARY, PRIMARY = range(3, 16)
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
