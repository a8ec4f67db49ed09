"""Outputs that keep most of an input, as a cache does that new rows are written into.

Only the elements that change are computed and stored. The others are those of the input: both lie in one
buffer (`honed.tuner.lower.plan`), so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import tvm_ffi
from tvm import ir, relax, s_tir, te, tirx, topi
from tvm.ir import IRModule

from honed.tuner.lower.statements import loads, nodes

from .fusing import given_back
from .views import INJECTIVE, bindings, is_call, readers

_UPDATE = "honed.update"  # of the block that stores what changes


def updated(module: IRModule) -> Set[relax.Var]:
    """Return the parameters of `main` that only a Where reads, as one of its values, to make an output."""
    main, outputs, read = module["main"], given_back(module), readers(module["main"])
    return {
        one
        for binding in bindings(main)
        if binding.var in outputs and is_call(binding.value, "relax.where")
        for one in binding.value.args[1:]
        if one in main.params and read[one] == 1 and one.ty == binding.var.ty
    }


def where(
    inputs: Set[relax.Var],
    bound: Mapping[relax.Var, relax.Expr],
    builder: relax.BlockBuilder,
    call: relax.Call,
) -> relax.Expr:
    """Return a Where that stores only the elements that it does not take from one of `inputs`, else TVM's.

    A Where that it reads becomes part of it: each element is computed in the branch that is taken, alone.
    """
    made = ir.Op.get("relax.where").get_attr("FLegalize")(builder, call)
    place = next((n for n in (1, 2) if call.args[n] in inputs), 0)
    if not place:
        return made
    other: Any = bound.get(call.args[3 - place])
    within = other.args if is_call(other, "relax.where") else [call.args[3 - place]]

    def chosen(condition: te.Tensor, past: te.Tensor, *values: te.Tensor) -> te.Tensor:
        value = topi.where(*values) if len(values) > 1 else values[0]
        return topi.where(condition, *((past, value) if place == 1 else (value, past)))

    made = builder.call_te(chosen, call.args[0], call.args[place], *within)
    plain = s_tir.Schedule(builder.get()[made.args[0]].with_attr("global_symbol", "main"))
    inner, *last = plain.get_child_blocks(plain.get_sblock("root"))
    if last:
        plain.compute_inline(inner)
    function = plain.mod["main"].without_attr("global_symbol")
    past = function.params[1]

    def stored(block: s_tir.SBlock) -> s_tir.SBlock:
        if not isinstance(block.body, tirx.BufferStore):
            return block
        return s_tir.SBlock(
            iter_vars=block.iter_vars,
            reads=[region for region in block.reads if not region.source.same_as(past)],
            writes=block.writes,
            name_hint="update",
            body=_in_branches(block.body, block.body.value, past),
            annotations={_UPDATE: 1},
        )

    update = function.with_body(tvm_ffi.structural_map(function.body, [(s_tir.SBlock, stored)]))
    for name, value in INJECTIVE.items():
        update = update.with_attr(name, value)
    return relax.call_tir(builder.add_func(update, "update"), made.args[1], call.ty)


def _in_branches(store: tirx.BufferStore, value: tirx.PrimExpr, past: ir.Var) -> tirx.Stmt | None:
    """Return the store of a value, each choice in it a branch; None for what is there."""
    if isinstance(value, ir.TensorLoad) and value.source.same_as(past):
        return None
    if not isinstance(value, tirx.Select):
        return tirx.BufferStore(store.buffer, value, list(store.indices))
    first, second = (_in_branches(store, one, past) for one in (value.true_value, value.false_value))
    if first is None:
        return tirx.IfThenElse(tirx.Not(value.condition), second, None)
    return tirx.IfThenElse(value.condition, first, second)


def kept(function: tirx.PrimFunc) -> int | None:
    """Return the parameter of a function that holds what it does not store; None where it stores all."""
    if not any(_UPDATE in block.annotations for block in nodes(function.body, s_tir.SBlock)):
        return None
    touched = [load.source for load in loads(function.body)]
    touched += [store.buffer for store in nodes(function.body, tirx.BufferStore)]
    (found,) = (n for n, one in enumerate(function.params) if not any(map(one.same_as, touched)))
    return found
