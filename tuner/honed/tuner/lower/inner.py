"""The buffers between the launches of a function, taken out of it.

TVM's StorageRewrite lets buffers share memory, a result with an operand of equal size too where each element
is made of the one in its place. Between kernels that is not for it to say: their arguments are `restrict`,
and the plan places every buffer of a model by when it is used. As parameters it leaves them alone.
"""

from __future__ import annotations

import tvm
from tvm import ir, tirx

from .statements import parts, rebuilt


def inner_as_parameters() -> tvm.transform.Pass:
    """The pass; it appends them to the parameters, in the order in which they are allocated."""
    return tirx.transform.prim_func_pass(_as_parameters, opt_level=0, name="honed.InnerAsParameters")


def _as_parameters(func: tirx.PrimFunc, _module: ir.IRModule, _context: object) -> tirx.PrimFunc:
    inner: list[ir.Var] = []
    body = _without(func.body, inner)
    if not inner:
        return func
    return tirx.PrimFunc([*func.params, *inner], body, func.ret_type, func.attrs, func.span)


def _without(stmt: tirx.Stmt, inner: list[ir.Var]) -> tirx.Stmt:
    """The statement without the allocations of global memory around launches, which go to `inner`."""
    if isinstance(stmt, tirx.AllocBuffer) and str(stmt.buffer.scope()) == "global":
        inner.append(stmt.buffer)
        return tirx.Evaluate(0)
    if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
        return stmt
    return rebuilt(stmt, [_without(part, inner) for part in parts(stmt)])
