"""Walks and rebuilds the statements of functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tvm import ir, s_tir, sym, tirx
from tvm.tirx.analysis import undefined_vars
from tvm_ffi import structural_map, structural_walk

_FIELDS = (
    *("iter_vars", "reads", "writes", "name_hint", "body"),
    *("init", "alloc_buffers", "match_buffers", "annotations"),
)


def parts(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements directly within a statement; none for one that computes."""
    if isinstance(stmt, tirx.SeqStmt):
        return list(stmt.seq)
    if isinstance(stmt, (tirx.For, tirx.AttrStmt)):
        return [stmt.body]
    if isinstance(stmt, tirx.IfThenElse):
        return [stmt.then_case] if stmt.else_case is None else [stmt.then_case, stmt.else_case]
    return []


def replace_statement(root: tirx.Stmt, old: tirx.Stmt, new: tirx.Stmt) -> tirx.Stmt:
    """Return a statement with `new` in place of this very `old` (compared by identity)."""
    return structural_map(root, [(type(old), lambda stmt: new if stmt.same_as(old) else stmt)])


def substitute(stmt: tirx.Stmt, values: Mapping[ir.Var, ir.Expr]) -> tirx.Stmt:
    """Return the statement with variables replaced by expressions."""
    return structural_map(stmt, [(ir.Var, lambda var: values.get(var, var))])


def with_fields(block: s_tir.SBlock, **changed: Any) -> s_tir.SBlock:
    """Return a block with other values of some of its fields."""
    return s_tir.SBlock(**{name: getattr(block, name) for name in _FIELDS} | changed)


def uses(expressions: Iterable[ir.Expr], variables: Iterable[ir.Var]) -> bool:
    """Return whether any of the variables occurs in any of the expressions."""
    wanted = list(variables)
    return any(used.same_as(v) for e in expressions for used in undefined_vars(e, []) for v in wanted)


def nodes(root: ir.Expr | tirx.Stmt, kind: type | tuple[type, ...]) -> list[Any]:
    """Return every node of a kind, outer ones first.

    The caller works on a list because exceptions raised while TVM walks would lose their type.
    """
    found: list[Any] = []
    structural_walk(root, [(kind, found.append)], order="pre")
    return found


def loads(root: ir.Expr | tirx.Stmt) -> list[ir.TensorLoad]:
    """Return every load of an element."""
    return nodes(root, ir.TensorLoad)


def lookup_tables(root: ir.Expr | tirx.Stmt, memory: Mapping[ir.Var, ir.Var] | None = None) -> set[ir.Var]:
    """Return the buffers that are read only at places that other loads give.

    With `memory` return the memory that holds them (`memory_by_buffer`).
    """
    found: dict[ir.Var, bool] = {}
    for load in loads(root):
        source = (memory or {}).get(load.source, load.source)
        found[source] = found.get(source, True) and any(loads(index) for index in load.indices)
    return {source for source, given in found.items() if given}


def count_reached(root: tirx.Stmt) -> dict[ir.Var, int]:
    """Return how many elements of each buffer the blocks of a function reach: those of a box around them."""
    boxes: dict[ir.Var, list[tuple[int, int]]] = {}
    for block in nodes(root, s_tir.SBlock):
        analyzer = sym.Analyzer()
        for axis in block.iter_vars:
            analyzer.bind(axis.var, axis.dom)
        for one in (*block.reads, *block.writes):
            box = [_bounds(analyzer, *each) for each in zip(one.region, one.source.shape, strict=True)]
            known = boxes.get(one.source, box)
            boxes[one.source] = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(known, box, strict=True)]
    return {buffer: math.prod(last - first for first, last in box) for buffer, box in boxes.items()}


def _bounds(analyzer: sym.Analyzer, span: ir.Range, extent: ir.Expr) -> tuple[int, int]:
    """Return the first and the one after the last place that a span may reach along a dimension."""
    end = analyzer.const_int_bound(extent).max_value
    first = max(0, analyzer.const_int_bound(span.min).min_value)
    last = analyzer.const_int_bound(span.min + span.extent).max_value
    return min(first, end), min(last, end)


def reduced_axes(block: s_tir.SBlock) -> list[tirx.IterVar]:
    """Return the axes that a block reduces along."""
    return [axis for axis in block.iter_vars if axis.iter_type == tirx.IterVar.CommReduce]


def is_call(expr: object, name: str) -> bool:
    """Return whether an expression calls TVM's operator of that name."""
    return isinstance(expr, ir.Call) and str(getattr(expr.op, "name", "")) == name


def memory_of(data: ir.Expr) -> ir.Expr:
    """Return the buffer, or the pointer argument, that holds the data of a declared buffer."""
    return data.args[0] if is_call(data, "tirx.buffer_data") else data


def memory_by_buffer(body: tirx.Stmt) -> dict[ir.Var, ir.Var]:
    """Return, by each declared buffer of a kernel, the allocated one or the pointer argument it is in."""
    found: dict[ir.Var, ir.Var] = {}
    for node in nodes(body, tirx.DeclBuffer):
        source = memory_of(node.data)
        found[node.buffer] = found.get(source, source)
    return found
