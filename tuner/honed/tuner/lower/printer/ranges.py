"""What the results of operators can be, from what their operands can be."""

from __future__ import annotations

from .terms import Term


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
