"""Floating-point literals that are read back as exactly the number they stand for."""

from __future__ import annotations

import math

import numpy as np

from . import types
from .terms import PRIMARY, UNARY, Term
from .types import Type

_SUFFIX = {16: "f", 32: "f", 64: ""}


def floating(value: float, of: Type) -> Term:
    """A number of a floating type; halves are written as singles, which hold them all."""
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
