"""Outputs that keep most of an input, as a cache does that new rows are written into.

Only the elements that change are computed and stored. The others are those of the input: both lie in one
buffer (`honed.tuner.lower.plan`), so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Set

import tvm_ffi
from tvm import ir, relax, s_tir, tirx
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
        if sum(map(one.same_as, binding.value.args)) == 1
    }


def where(inputs: Set[relax.Var], builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return a Where that stores only what it does not take of one of the inputs, else TVM's."""
    made = ir.Op.get("relax.where").get_attr("FLegalize")(builder, call)
    place = next((n for n in (1, 2) if call.args[n] in inputs), 0)
    if not place:
        return made
    plain: tirx.PrimFunc = builder.get()[made.args[0]]

    def stored(block: s_tir.SBlock) -> s_tir.SBlock:
        store = block.body
        if not isinstance(store, tirx.BufferStore):
            return block
        select, kept = store.value, plain.params[place]
        condition, *values = select.condition, select.true_value, select.false_value
        changed = tirx.BufferStore(store.buffer, values[2 - place], list(store.indices))
        return s_tir.SBlock(
            iter_vars=block.iter_vars,
            reads=[region for region in block.reads if not region.source.same_as(kept)],
            writes=block.writes,
            name_hint="update",
            body=tirx.IfThenElse(tirx.Not(condition) if place == 1 else condition, changed, None),
            annotations={_UPDATE: 1},
        )

    update = plain.with_body(tvm_ffi.structural_map(plain.body, [(s_tir.SBlock, stored)]))
    for name, value in INJECTIVE.items():
        update = update.with_attr(name, value)
    return relax.call_tir(builder.add_func(update, "update"), made.args[1], call.ty)


def kept(function: tirx.PrimFunc) -> int | None:
    """Return the parameter of a function that holds what it does not store; None where it stores all."""
    if not any(_UPDATE in block.annotations for block in nodes(function.body, s_tir.SBlock)):
        return None
    touched = [load.source for load in loads(function.body)]
    touched += [store.buffer for store in nodes(function.body, tirx.BufferStore)]
    (found,) = (n for n, one in enumerate(function.params) if not any(map(one.same_as, touched)))
    return found
