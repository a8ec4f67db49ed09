"""Walking and rebuilding the statements of lowered functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tvm import ir, tirx
from tvm.tirx.analysis import undefined_vars
from tvm_ffi import structural_map, structural_walk


def parts(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """The statements right within a statement; none for one that computes."""
    if isinstance(stmt, tirx.SeqStmt):
        return list(stmt.seq)
    if isinstance(stmt, (tirx.For, tirx.AttrStmt)):
        return [stmt.body]
    if isinstance(stmt, tirx.IfThenElse):
        return [stmt.then_case] if stmt.else_case is None else [stmt.then_case, stmt.else_case]
    return []


def rebuilt(stmt: tirx.Stmt, within: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """The statement with other parts, as many as `parts` gives; itself where they are its own."""
    if all(new.same_as(old) for new, old in zip(within, parts(stmt), strict=True)):
        return stmt
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt(list(within))
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, within[0])
    if isinstance(stmt, tirx.IfThenElse):
        return tirx.IfThenElse(stmt.condition, within[0], within[1] if len(within) > 1 else None)
    return tirx.For(
        stmt.loop_var,
        stmt.min,
        stmt.extent,
        stmt.kind,
        within[0],
        stmt.thread_binding,
        stmt.annotations,
        stmt.step,
    )


def replaced(stmt: tirx.Stmt, old: tirx.Stmt, new: tirx.Stmt) -> tirx.Stmt:
    """The statement with `new` wherever this very `old` stands in it."""
    return new if stmt.same_as(old) else rebuilt(stmt, [replaced(part, old, new) for part in parts(stmt)])


def substituted(stmt: tirx.Stmt, values: Mapping[ir.Var, ir.Expr]) -> tirx.Stmt:
    """The statement with expressions in place of variables."""
    return structural_map(stmt, [(ir.Var, lambda var: values.get(var, var))])


def uses(expressions: Iterable[ir.Expr], variables: Iterable[ir.Var]) -> bool:
    """Whether any of the variables occurs in any of the expressions."""
    wanted = list(variables)
    return any(used.same_as(v) for e in expressions for used in undefined_vars(e, []) for v in wanted)


def loads(expr: ir.Expr | tirx.Stmt) -> list[ir.TensorLoad]:
    """Every element that is read, in no order."""
    found: list[ir.TensorLoad] = []
    structural_walk(expr, [(ir.TensorLoad, found.append)], order="post")
    return found
