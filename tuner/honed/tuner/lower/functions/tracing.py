"""Which operators each call of a fused module computes.

Fusing makes new functions, one for all calls that do the same, and new variables. What a call computes is
found by following it into its function: an operator is known by what it calls and what it is given, as equal
ones were made one before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from tvm import ir, relax
from tvm.ir import IRModule

Traced = Mapping[relax.Var, tuple[relax.Var, ...]]  # by the variable of a call, those of its operators
Known = dict[relax.Var, Hashable]


def trace(plain: relax.Function, fused: IRModule) -> Traced:
    """By each variable of `main` of a fused module, the variables of the unfused `main` that it computes."""
    operators = {_operator(b.value, {}): b.var for b in bindings(plain) if isinstance(b.value, relax.Call)}
    known: Known = {}
    found: dict[relax.Var, tuple[relax.Var, ...]] = {}
    for binding in bindings(fused["main"]):
        value = binding.value
        if isinstance(value, relax.Call) and isinstance(value.op, ir.GlobalVar):
            function = fused[value.op]
            within: Known = {p: _key(a, known) for p, a in zip(function.params, value.args, strict=True)}
            found[binding.var] = _follow(function, within, operators)
            known[binding.var] = _key(function.body.body, within)
        elif isinstance(value, relax.Call):
            known[binding.var] = operator = operators.get(_operator(value, known), binding.var)
            found[binding.var] = (operator,)
        else:
            known[binding.var] = _key(value, known)
    return found


def _follow(
    function: relax.Function, known: Known, operators: Mapping[Hashable, relax.Var]
) -> tuple[relax.Var, ...]:
    """The operators of a function whose parameters are known; its variables become known."""
    found = []
    for binding in bindings(function):
        if isinstance(binding.value, relax.Call):
            operator = operators.get(_operator(binding.value, known), binding.var)
            known[binding.var] = operator
            found.append(operator)
        else:
            known[binding.var] = _key(binding.value, known)
    return tuple(found)


def bindings(function: relax.Function) -> list[relax.Binding]:
    """All bindings of a function, in order."""
    return [binding for block in function.body.blocks for binding in block.bindings]


def rebound(
    function: relax.Function, become: Callable[[relax.Binding], relax.Binding | None]
) -> relax.Function:
    """The function with other bindings; without those that become None."""
    blocks = [
        type(block)([new for one in block.bindings if (new := become(one)) is not None])
        for block in function.body.blocks
    ]
    whole = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, whole, function.ret_ty, function.is_pure, function.attrs)


def _operator(call: relax.Call, known: Known) -> Hashable:
    return str(call.op.name), tuple(_key(argument, known) for argument in call.args), str(call.attrs)


def _key(expr: relax.Expr, known: Known) -> Hashable:
    """What is equal for equal values; constants are equal to themselves alone."""
    found: Hashable = expr
    if isinstance(expr, relax.Var):
        return known.get(expr, found)
    if isinstance(expr, ir.GlobalVar):
        return str(expr.name_hint)
    if isinstance(expr, relax.Tuple):
        return tuple(_key(field, known) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        whole = _key(expr.tuple_value, known)
        found = whole[expr.index] if isinstance(whole, tuple) else (whole, int(expr.index))
    return found
