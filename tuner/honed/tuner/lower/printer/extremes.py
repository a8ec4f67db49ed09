"""The larger and the smaller of two floats, as functions of a source.

OpenCL leaves `max` and `min` undefined for NaN and infinities (OpenCL C 3.0, 6.15.4); `fmax` and `fmin` leave
NaN out, and take PoCL up to 1.9 times as long. A comparison with a selection says what NaN gives, and
compilers make the device's own instruction of it where there is one with that meaning.
"""

from __future__ import annotations

import re
from typing import Any

from tvm import tirx

from . import types
from .types import Type

_USED = re.compile(r"\bhoned_(nan)?(max|min)_(float|half|double)(\d*)\b")

_MASKS = {"half": "short", "float": "int", "double": "long"}


def name(which: str, of: Type) -> str:
    """The function's name: `max` or `min` give the first number where it is NaN, and leave out a second one
    that is; `nanmax` and `nanmin` give NaN where either is.
    """
    return f"honed_{which}_{types.name(of)}"


def definitions(source: str) -> list[str]:
    """Those functions that a source uses, in the order of their names."""
    found = sorted({match.groups(default="") for match in _USED.finditer(source)})
    return [_definition(*parts) for parts in found]


def _definition(nan: str, which: str, element: str, lanes: str) -> str:
    of, better = f"{element}{lanes}", f"y {'>' if which == 'max' else '<'} x"
    value = f"select(x, y, {better})" if lanes else f"{better} ? y : x"
    if nan:  # scalars without a branch, which PoCL would not make vectors of
        mask = "" if lanes else f"({_MASKS[element]})"
        value = f"select(x, y, {mask}({better}) | {mask}(y != y))"
    return f"static inline {of} honed_{nan}{which}_{of}({of} x, {of} y) {{ return {value}; }}"


def never_nan(expr: Any) -> bool:
    """Whether the value is a number whatever the inputs hold."""
    if isinstance(expr, tirx.Broadcast):
        return never_nan(expr.value)
    if isinstance(expr, tirx.Cast):
        return "float" not in str(expr.value.ty.dtype) or never_nan(expr.value)
    if isinstance(expr, tirx.Max | tirx.Min):
        return never_nan(expr.a) and never_nan(expr.b)
    return isinstance(expr, tirx.FloatImm) and float(expr.value) == float(expr.value)
