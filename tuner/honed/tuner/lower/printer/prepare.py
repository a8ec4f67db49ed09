"""What is done to a kernel before it is printed: short loops over private arrays are written out.

An array whose indices are all constant can be held in registers; one that a loop counts through cannot.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import IRModule
from tvm.s_tir.pipeline import finalize_device_passes
from tvm_ffi import structural_walk

_MOST_TURNS = 16  # of a loop that is written out
_MOST_STATEMENTS = 128  # that one outermost loop may become


def prepared(kernels: dict[str, tirx.PrimFunc]) -> dict[str, tirx.PrimFunc]:
    """The kernels with TVM's last passes done, and with the loops over private arrays written out."""
    final = finalize_device_passes()(IRModule(kernels))
    found = {str(f.attrs["global_symbol"]): _marked(f) for f in final.functions.values()}
    if not any(changed for _, changed in found.values()):
        return {entry: func for entry, (func, _) in found.items()}
    module = IRModule({entry: func for entry, (func, _) in found.items()})
    for step in (tirx.transform.UnrollLoop(), tirx.transform.StmtSimplify(), tirx.transform.RemoveNoOp()):
        module = step(module)
    return {str(f.attrs["global_symbol"]): f for f in module.functions.values()}


def _marked(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, bool]:
    """The kernel with loops to be written out marked, and whether there are any."""
    private = _private(func.body)
    if not private:
        return func, False
    chosen: set[Any] = set()
    _choose(func.body, private, chosen)
    if not chosen:
        return func, False

    def mark(loop: tirx.For) -> tirx.For:
        if loop.loop_var not in chosen:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.For, mark)])), True


def _private(body: tirx.Stmt) -> set[Any]:
    found: set[Any] = set()

    def allocated(node: tirx.AllocBuffer) -> None:
        if str(node.buffer.scope()) == "local":
            found.add(node.buffer)

    structural_walk(body, [(tirx.AllocBuffer, allocated)], order="pre")
    return found


def _choose(statement: Any, private: set[Any], chosen: set[Any]) -> int:
    """Choose loops in a statement, inner ones first; how many statements it will be."""
    if isinstance(statement, tirx.SeqStmt):
        return sum(_choose(part, private, chosen) for part in statement.seq)
    if isinstance(statement, tirx.AttrStmt):
        return _choose(statement.body, private, chosen)
    if isinstance(statement, tirx.IfThenElse):
        most = _choose(statement.then_case, private, chosen)
        return most + (
            _choose(statement.else_case, private, chosen) if statement.else_case is not None else 0
        )
    if isinstance(statement, tirx.While):
        return _choose(statement.body, private, chosen)
    if not isinstance(statement, tirx.For):
        return 1
    inside = _choose(statement.body, private, chosen)
    extent = int(statement.extent) if isinstance(statement.extent, tirx.IntImm) else _MOST_TURNS + 1
    if (
        statement.kind == tirx.ForKind.SERIAL
        and extent <= _MOST_TURNS
        and extent * inside <= _MOST_STATEMENTS
        and _indexes(statement, private)
    ):
        chosen.add(statement.loop_var)
        return extent * inside
    return inside


def _indexes(loop: tirx.For, private: set[Any]) -> bool:
    """Whether the loop's variable is in an index into a private array."""
    found = False

    def visit(buffer: Any, indices: Any) -> None:
        nonlocal found
        if buffer in private and not found:
            found = any(_mentions(index, loop.loop_var) for index in indices)

    structural_walk(
        loop.body,
        [
            (ir.TensorLoad, lambda n: visit(n.source, n.indices)),
            (tirx.BufferStore, lambda n: visit(n.buffer, n.indices)),
        ],
        order="pre",
    )
    return found


def _mentions(index: Any, variable: Any) -> bool:
    found = False

    def visit(node: Any) -> None:
        nonlocal found
        found = found or node.same_as(variable)

    structural_walk(index, [(ir.Var, visit)], order="pre")
    return found
