"""Reductions over a single element become plain assignments.

Such a reduction is left where a kernel, a pooling window or a reduced axis has one element. Schedules drop
its loops, and with them all that tells it from an elementwise block; inlining the operators that follow then
inlines them into its initial value too, and they are applied twice (TVM 0.27, ReverseComputeInline).
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import IRModule


def assign_single_elements(module: IRModule) -> IRModule:
    """The same module, with no block that reduces a single element in any of its functions."""
    for name, func in list(module.functions.items()):
        if isinstance(func, tirx.PrimFunc):
            body = tvm_ffi.structural_map(func.body, [(s_tir.SBlock, _assigned)])
            if not body.same_as(func.body):
                module.update_func(name, func.with_body(body))
    return module


def _assigned(block: s_tir.SBlock) -> s_tir.SBlock:
    reduced = [v for v in block.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
    if block.init is None or not all(_is_one(v.dom.extent) for v in reduced):
        return block
    return s_tir.SBlock(
        iter_vars=[_spatial(v) for v in block.iter_vars],
        reads=block.reads,
        writes=block.writes,
        name_hint=block.name_hint,
        body=_folded(block.init, block.body),
        init=None,
        alloc_buffers=block.alloc_buffers,
        match_buffers=block.match_buffers,
        annotations=block.annotations,
    )


def _is_one(extent: ir.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _spatial(axis: tirx.IterVar) -> tirx.IterVar:
    return tirx.IterVar(axis.dom, axis.var, tirx.IterVar.DataPar, axis.thread_tag)


def _folded(init: tirx.Stmt, update: tirx.Stmt) -> tirx.Stmt:
    """The update of the initial value, as one assignment where both are one."""
    if not (isinstance(init, tirx.BufferStore) and isinstance(update, tirx.BufferStore)):
        return tirx.SeqStmt([init, update])

    def initial(load: ir.TensorLoad) -> ir.Expr:
        return init.value if load.source.same_as(init.buffer) else load

    value = tvm_ffi.structural_map(update.value, [(ir.TensorLoad, initial)])
    return tirx.BufferStore(update.buffer, value, list(update.indices))
