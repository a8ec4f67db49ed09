"""The names that OpenCL C has for functions TVM would write as in C.

TVM lowers a function that it has no OpenCL rule for to C's name: `tanf` for float32, nothing at all for
float16. OpenCL C has neither; its names are overloaded for every floating type and for vectors (OpenCL C
3.0, 6.15.2).
"""

from __future__ import annotations

from tvm import ir, tirx

from .dotnames import DOT

NAMES = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "hypot", "ldexp", "log1p",
    "nextafter", "tan",
)  # fmt: skip
_LEVEL = 99  # above the rules that TVM brings along


def register() -> None:
    """Have TVM lower these functions to calls by OpenCL's names."""
    for name in NAMES:
        tirx.register_intrin_lowering(f"tirx.{name}", target="opencl", f=_by_name, level=_LEVEL)


def is_dot(expr: ir.Expr) -> bool:
    """Whether it is a call of DOT."""
    name = str(getattr(getattr(expr, "op", None), "name", ""))
    return name.endswith("call_pure_extern") and str(expr.args[0].value) == DOT


def _by_name(call: tirx.PrimExpr) -> tirx.PrimExpr:
    name = str(call.op.name).removeprefix("tirx.")
    return tirx.call_pure_extern(call.ty, name, *call.args)
