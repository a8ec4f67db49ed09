"""What functions and kernels compute and move."""

from __future__ import annotations

from tvm import sym, tirx
from tvm.ir import IRModule
from tvm.s_tir.analysis import estimate_tir_flops
from tvm_ffi import structural_walk

from .program import MemoryValue

_UNKNOWN = 2**31  # what the bound of an expression is beyond where it has none
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)


def function_flops(func: tirx.PrimFunc) -> int:
    """Operations of an unscheduled function; arithmetic, comparisons and intrinsics count as one each."""
    return int(estimate_tir_flops(IRModule({"main": func})))


def function_bytes(func: tirx.PrimFunc) -> int:
    """Bytes of an unscheduled function's parameters: what it moves at least."""
    return sum(value.nbytes for value in parameters(func))


def parameters(func: tirx.PrimFunc) -> tuple[MemoryValue, ...]:
    """A function's parameters as values."""
    return tuple(
        MemoryValue(dtype=str(p.dtype), shape=tuple(int(extent) for extent in p.shape)) for p in func.params
    )


def executed_operations(body: tirx.Stmt, work_items: int) -> int:
    """Floating-point operations a lowered kernel executes, guards taken as passed.

    Only good for dividing a function's work among its kernels: padding and repeated work count too.
    """
    return max(1, _operations(body)) * work_items


def _operations(stmt: tirx.Stmt) -> int:
    if isinstance(stmt, tirx.SeqStmt):
        return sum(_operations(part) for part in stmt.seq)
    if isinstance(stmt, tirx.For):
        most = sym.Analyzer().const_int_bound(stmt.extent).max_value
        return most * _operations(stmt.body) if most < _UNKNOWN else 1
    if isinstance(stmt, tirx.IfThenElse):
        return _operations(stmt.then_case)
    if isinstance(stmt, tirx.AttrStmt):
        return _operations(stmt.body)
    if isinstance(stmt, tirx.BufferStore):
        return _float_operations(stmt.value)
    return 0


def _float_operations(expr: tirx.PrimExpr) -> int:
    found = 0

    def count(node: tirx.PrimExpr) -> None:
        nonlocal found
        dtype = str(node.ty.dtype)
        if dtype.startswith("float"):
            found += int(dtype.partition("x")[2] or 1)

    structural_walk(expr, [(kind, count) for kind in _ARITHMETIC], order="post")
    return found
