"""Computes outputs that keep most of an input, like a cache that new rows are written into.

Only the elements that change are computed and stored. The others are those of the input: both lie in one
buffer (`honed.tuner.lower.plan`), so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import tvm_ffi
from tvm import ir, relax, s_tir, te, tirx, topi
from tvm.ir import IRModule

from honed.tuner.lower.statements import is_call, loads, nodes, substitute, with_fields

from .fusing import Chain, Traced, one_function, replace_chains, result_variables
from .views import INJECTIVE, bindings, readers, variables

_UPDATE = "honed.update"  # Marks the block that stores the changed elements


def find_updated(module: IRModule) -> Set[relax.Var]:
    """Return the parameters of `main` that only a Where reads, as one of its values, to make an output."""
    main, outputs, read = module["main"], result_variables(module), readers(module["main"])
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
    """Return a Where that stores only the elements that do not come from one of `inputs`, else TVM's.

    A Where that it reads becomes part of it: each element is computed only in its branch.
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

    def store_in_branches(block: s_tir.SBlock) -> s_tir.SBlock:
        if not isinstance(block.body, tirx.BufferStore):
            return block
        return with_fields(
            block,
            reads=[region for region in block.reads if not region.source.same_as(past)],
            name_hint="update",
            body=_in_branches(block.body, block.body.value, past),
            annotations={_UPDATE: 1},
        )

    body = tvm_ffi.structural_map(function.body, [(s_tir.SBlock, store_in_branches)])
    update = builder.add_func(function.with_body(body).with_attr(INJECTIVE), "update")
    return relax.call_tir(update, made.args[1], call.ty)


def _in_branches(store: tirx.BufferStore, value: tirx.PrimExpr, past: ir.Var) -> tirx.Stmt | None:
    """Return the store of a value, with each choice in it as a branch; None if the value is there already."""
    if isinstance(value, ir.TensorLoad) and value.source.same_as(past):
        return None
    if not isinstance(value, tirx.Select):
        return tirx.BufferStore(store.buffer, value, list(store.indices))
    first, second = (_in_branches(store, one, past) for one in (value.true_value, value.false_value))
    if first is None:
        return tirx.IfThenElse(tirx.Not(value.condition), second, None)
    return tirx.IfThenElse(value.condition, first, second)


def parameters_kept(function: tirx.PrimFunc) -> tuple[int, ...]:
    """Return the parameters of a function whose elements it keeps, one for each of its outputs.

    Return none where it stores all elements.
    """
    if not any(_UPDATE in block.annotations for block in nodes(function.body, s_tir.SBlock)):
        return ()
    touched = [load.source for load in loads(function.body)]
    touched += [store.buffer for store in nodes(function.body, tirx.BufferStore)]
    return tuple(n for n, one in enumerate(function.params) if not any(map(one.same_as, touched)))


def update_together(module: IRModule) -> tuple[IRModule, Traced]:
    """Return a module of fused functions in which two updates, as of keys and values, are one function.

    Also return, by the variable of each such call, the variables of the calls that it replaces.
    """

    def join(pair: Chain) -> tuple[str, tirx.PrimFunc] | None:
        name, function = one_function(module, pair)
        merged = _in_one_block(function)
        return None if merged is None else (name, merged)

    return replace_chains(module, _pairs(module), join)


def _pairs(module: IRModule) -> Iterator[Chain]:
    """Yield updates of equal shapes, of which the second comes before all that reads the first."""
    first: relax.VarBinding | None = None
    for binding in bindings(module["main"]):
        if first is not None and first.var in variables(binding.value):
            first = None
        if not is_call(binding.value, "relax.call_tir") or not parameters_kept(module[binding.value.args[0]]):
            continue
        if first is not None and first.var.ty == binding.var.ty:
            yield Chain((first, binding))
            first = None
        else:
            first = binding


def _in_one_block(function: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Return a function of two updates with a single block.

    None where an earlier block is not elementwise.
    """
    plain = s_tir.Schedule(function.with_attr("global_symbol", "main"))
    for block in plain.get_child_blocks(plain.get_sblock("root")):
        if _UPDATE not in plain.get(block).annotations:
            try:
                plain.compute_inline(block)
            except s_tir.ScheduleError:
                return None
    one, other = (plain.get(block) for block in plain.get_child_blocks(plain.get_sblock("root")))
    axes = {theirs.var: ours.var for ours, theirs in zip(one.iter_vars, other.iter_vars, strict=True)}
    second = substitute(s_tir.SBlock([], other.reads, other.writes, other.name_hint, other.body), axes)
    stored = one.writes[0].source

    def both(block: s_tir.SBlock) -> s_tir.SBlock:
        if not block.writes:  # The root, of which the first nest stays
            return s_tir.SBlock([], [], [], block.name_hint, block.body.seq[0])
        if not block.writes[0].source.same_as(stored):
            return block
        return with_fields(
            block,
            reads=[*block.reads, *second.reads],
            writes=[*block.writes, *second.writes],
            body=tirx.SeqStmt([block.body, second.body]),
        )

    made = plain.mod["main"]
    body = tvm_ffi.structural_map(made.body, [(s_tir.SBlock, both)])
    return made.with_body(body).without_attr("global_symbol")
