"""Rewrites scheduled functions so that long sums are added up in blocks.

A loop that adds many terms to the same element adds a block of them to a private partial sum, and that to
the element; `sums` says how long a block is and what is won. It is done to the loops of the scheduled
function, whatever made the schedule, so that it holds for every kernel and no schedule has to know of it:

    for k in range(4096):                 for b in range(32):
        sum[i] = sum[i] + x[i, k]             part[0] = 0.0
                                              for k in range(128):
                                                  part[0] = part[0] + x[i, b * 128 + k]
                                              sum[i] = sum[i] + part[0]

The sums of the blocks may be a long sum again, which is rewritten in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import ir, s_tir, tirx

from .statements import parts, rebuilt, replaced, substituted, uses
from .sums import Leaf, LongSum, find

_WRITTEN_OUT = 16  # partial sums, which then stay in registers whatever the compiler does


def stage_sums() -> tvm.transform.Pass:
    """The pass; it takes functions whose blocks are lowered and whose buffers are not yet flattened."""
    return tirx.transform.prim_func_pass(_stage, opt_level=0, name="honed.StageSums")


def in_stages(func: tirx.PrimFunc) -> ir.IRModule:
    """An unscheduled function as `main` of a module, lowered as far as it takes to add up in blocks."""
    s = s_tir.transform
    lowered = tvm.transform.Sequential(
        [
            s.CanonicalizeLoop(),
            s.LowerInitBlock(),
            s.PlanAndUpdateBufferAllocationLocation(),
            s.ConvertBlocksToOpaque(),
            s.CompactBufferAllocation(),
            s.LowerMatchBuffer(),
            s.LowerOpaqueBlock(),
            stage_sums(),
        ]
    )
    return lowered(ir.IRModule({"main": func}))


def _stage(func: tirx.PrimFunc, _module: ir.IRModule, _context: object) -> tirx.PrimFunc:
    body = _staged(func.body)
    return func if body.same_as(func.body) else func.with_body(body)


def _staged(stmt: tirx.Stmt) -> tirx.Stmt:
    if isinstance(stmt, tirx.For):
        long = find(stmt)
        if long is not None:
            return _staged(_rewritten(stmt, long))
    return rebuilt(stmt, [_staged(part) for part in parts(stmt)])


def _rewritten(loop: tirx.For, long: LongSum) -> tirx.Stmt:
    """The loop with a sum in blocks, after the sum's initial store if that stood in it."""
    result = replaced(loop, long.leaf.loops[long.at], _in_blocks(long))
    if long.init is None:
        return result
    return tirx.SeqStmt([_for_each_element(long, long.init, 0, long.init.stmt), result])


def _in_blocks(long: LongSum) -> tirx.Stmt:
    """The loop that is cut, as blocks."""
    cut, store, within = long.leaf.loops[long.at], long.leaf.stmt, long.at + 1
    elements = _elements(long, within)
    shape = [int(one.extent) for one in elements] or [1]
    part = tirx.decl_buffer(shape, store.buffer.dtype, f"{store.buffer.name}_part", scope="local")
    at = [one.loop_var for one in elements] or [tirx.const(0, "int32")]
    partial, whole = tirx.BufferLoad(part, at), tirx.BufferLoad(store.buffer, list(store.indices))
    begin = tirx.BufferStore(part, tirx.const(0, store.buffer.dtype), at)
    end = tirx.BufferStore(store.buffer, whole + partial, list(store.indices))
    body = replaced(cut.body, store, tirx.BufferStore(part, partial + long.term, at))
    if long.init is not None:
        body = replaced(body, long.init.stmt, tirx.Evaluate(0))

    dtype, extent = cut.loop_var.ty.dtype, int(cut.extent)

    def block(number: ir.Expr) -> tirx.Stmt:
        first = number * long.block
        length = tirx.const(long.block, dtype)
        if extent % long.block:  # the last one is shorter
            length = tirx.Min(length, extent - first)
        return tirx.SeqStmt(
            [
                _for_each_element(long, long.leaf, within, begin),
                _repeat(cut, length, lambda n: substituted(body, {cut.loop_var: first + n})),
                _for_each_element(long, long.leaf, within, end),
            ]
        )

    count = tirx.const(math.ceil(extent / long.block), dtype)
    return tirx.SeqStmt([tirx.AllocBuffer(part), _repeat(cut, count, block)])


def _repeat(like: tirx.For, count: ir.Expr, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    """A loop of the same kind, around what `body` makes of its variable."""
    known = isinstance(count, tirx.IntImm)
    zero = tirx.const(0, like.loop_var.ty.dtype)
    if known and int(count) == 1:
        return body(zero)
    var = tirx.Var(like.loop_var.name, like.loop_var.ty.dtype)
    kind = like.kind if known else tirx.ForKind.SERIAL
    return tirx.For(var, zero, count, kind, body(var), annotations=like.annotations)


def _elements(long: LongSum, within: int) -> list[tirx.For]:
    """The loops over elements, from loop number `within` on."""
    return [one for one in long.leaf.loops[within:] if not any(one.same_as(s) for s in long.summed)]


def _for_each_element(long: LongSum, leaf: Leaf, within: int, stmt: tirx.Stmt) -> tirx.Stmt:
    """`stmt` for all elements that the loops from number `within` on cover, under their conditions."""
    over = [one.loop_var for one in long.summed]
    for depth, condition in reversed(leaf.conditions):
        if depth >= within and not uses([condition], over):
            stmt = tirx.IfThenElse(condition, stmt, None)
    loops = _elements(long, within)
    fresh = {one.loop_var: tirx.Var(one.loop_var.name, one.loop_var.ty.dtype) for one in loops}
    stmt = substituted(stmt, fresh)
    count = 1
    for one in reversed(loops):
        count *= int(one.extent)
        kind = one.kind
        if kind == tirx.ForKind.SERIAL and count <= _WRITTEN_OUT:
            kind = tirx.ForKind.UNROLLED
        stmt = tirx.For(fresh[one.loop_var], one.min, one.extent, kind, stmt)
    return stmt
