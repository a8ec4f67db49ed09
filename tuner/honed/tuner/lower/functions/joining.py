"""Functions that follow each other as one, which TVM fuses each for itself.

Attentions, and convolutions of each channel by itself with the pointwise one that reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, s_tir, tirx
from tvm.ir import IRModule
from tvm_ffi import structural_walk

from .tracing import bindings, rebound

_Form = tuple[object, ...]
_BLOCKED_AXES = 5  # of images whose channels lie in blocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedFunction:
    """A function of a module. `constants` are the parameters that are constants in all its calls."""

    name: str
    func: tirx.PrimFunc
    constants: frozenset[int]
    outputs: int  # of its last parameters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoForms:
    """Functions of which each is read by the next alone, and the one that they would become."""

    apart: tuple[NamedFunction, ...]
    joined: NamedFunction
    calls: int  # in `main`


Joins = Callable[[TwoForms], bool]  # whether to join them


def never(_forms: TwoForms) -> bool:
    """Join nothing."""
    return False


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """Calls of which each is read by the next alone."""

    bindings: tuple[relax.VarBinding, ...]

    @property
    def functions(self) -> list[ir.GlobalVar]:
        """What they call."""
        return [_function(binding) for binding in self.bindings]

    @property
    def given(self) -> list[relax.Expr]:
        """What they read that none of them makes, each once."""
        made = {binding.var for binding in self.bindings}
        read = (argument for binding in self.bindings for argument in binding.value.args[1])
        return [argument for argument in dict.fromkeys(read) if argument not in made]

    @property
    def form(self) -> _Form:
        """What is equal for chains that become the same function."""
        names = {value: n for n, value in enumerate((*self.given, *(b.var for b in self.bindings)))}
        read = [tuple(names[argument] for argument in binding.value.args[1]) for binding in self.bindings]
        return tuple(str(one.name_hint) for one in self.functions), tuple(read)


def join_functions(
    module: IRModule, joins: Joins
) -> tuple[IRModule, Mapping[relax.Var, tuple[relax.Var, ...]]]:
    """A module of fused functions, with those chains of `main` as single functions that `joins` is for.

    Besides, by the variable of each such call, those of the calls whose place it takes.
    """
    builder = relax.BlockBuilder(module)
    names: dict[_Form, ir.GlobalVar | None] = {}
    chains: dict[relax.Var, _Chain] = {}
    taken: set[relax.Var] = set()
    alike: dict[_Form, list[_Chain]] = {}
    for chain in (found := list(_chains(module))):
        alike.setdefault(chain.form, []).append(chain)
    calls, _ = _calls(module["main"])
    for chain in found:
        if not taken.isdisjoint(binding.var for binding in chain.bindings):
            continue
        if chain.form not in names:
            forms = _forms(module, alike[chain.form], list(calls.values()))
            joined = joins(forms)
            names[chain.form] = builder.add_func(forms.joined.func, forms.joined.name) if joined else None
        if names[chain.form] is not None:
            chains[chain.bindings[-1].var] = chain
            taken.update(binding.var for binding in chain.bindings)
    if not chains:
        return module, {}
    calls = {
        var: relax.VarBinding(var, relax.call_tir(names[chain.form], chain.given, var.ty))
        for var, chain in chains.items()
    }
    changed = rebound(module["main"], lambda one: calls.get(one.var, None if one.var in taken else one))
    builder.update_func(module.get_global_var("main"), changed)
    replaced = {var: tuple(binding.var for binding in chain.bindings) for var, chain in chains.items()}
    return relax.transform.DeadCodeElimination()(builder.get()), replaced


def _chains(module: IRModule) -> Iterator[_Chain]:
    """What may be an attention, or two convolutions of blocked tensors; each call is read by the next alone.

    An attention is a product, reductions of its rows, and another product.
    """
    calls, readers = _calls(module["main"])
    reductions = {name: _reductions(module[name]) for name in map(_function, calls.values())}

    def made_for(binding: relax.VarBinding) -> Iterator[tuple[int, relax.VarBinding]]:
        """The calls whose results a call alone reads, with how many reductions there are in each."""
        for argument in binding.value.args[1]:
            if argument in calls and readers[argument] == 1:
                yield reductions[_function(calls[argument])], calls[argument]

    for last in calls.values():
        if reductions[_function(last)] != 1:
            continue
        for several, middle in made_for(last):
            if several > 1:
                for single, first in made_for(middle):
                    if single == 1:
                        yield _Chain((first, middle, last))
            elif several == 1 and _axes(last) == _axes(middle) == _BLOCKED_AXES:
                yield _Chain((middle, last))


def _axes(binding: relax.VarBinding) -> int:
    """Of the result of a call."""
    return len(binding.var.ty.shape) if hasattr(binding.var.ty, "shape") else 0


def _calls(main: relax.Function) -> tuple[dict[relax.Var, relax.VarBinding], Counter[relax.Var]]:
    """The calls of functions by their variables, and how often each variable is read."""
    calls: dict[relax.Var, relax.VarBinding] = {}
    readers: Counter[relax.Var] = Counter()

    def count(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Var):
            readers[expr] += 1

    for binding in bindings(main):
        value = binding.value
        if isinstance(value, relax.Call) and str(getattr(value.op, "name", "")) == "relax.call_tir":
            calls[binding.var] = binding
        relax.analysis.post_order_visit(value, count)
    relax.analysis.post_order_visit(main.body.body, count)
    return calls, readers


def _function(binding: relax.VarBinding) -> ir.GlobalVar:
    return binding.value.args[0]


def _reductions(func: tirx.PrimFunc) -> int:
    """How many blocks of a function reduce."""
    found: list[Any] = []
    structural_walk(func.body, [(s_tir.SBlock, found.append)], order="pre")
    return sum(any(a.iter_type == tirx.IterVar.CommReduce for a in block.iter_vars) for block in found)


def _forms(module: IRModule, chains: Sequence[_Chain], calls: Sequence[relax.VarBinding]) -> TwoForms:
    """Both forms of chains that become the same function, in a `main` of these calls."""
    name, func = _joined(module, chains[0])
    apart = tuple(
        NamedFunction(
            name=str(function.name_hint),
            func=module[function],
            constants=_constants([one.value.args[1] for one in calls if _function(one).same_as(function)]),
            outputs=_outputs(binding),
        )
        for binding, function in zip(chains[0].bindings, chains[0].functions, strict=True)
    )
    joined = NamedFunction(
        name=name,
        func=func,
        constants=_constants([chain.given for chain in chains]),
        outputs=_outputs(chains[0].bindings[-1]),
    )
    return TwoForms(apart=apart, joined=joined, calls=len(chains))


def _constants(calls: Sequence[Sequence[relax.Expr]]) -> frozenset[int]:
    """The arguments that are constants in all calls of a function."""
    found = [{n for n, one in enumerate(given) if isinstance(one, ir.GenericConst)} for given in calls]
    return frozenset(set.intersection(*found))


def _outputs(binding: relax.VarBinding) -> int:
    """How many a call gives."""
    return len(getattr(binding.var.ty, "fields", (binding.var,)))


def _joined(module: IRModule, chain: _Chain) -> tuple[str, tirx.PrimFunc]:
    """The one function that the calls of a chain become, with a name for it."""
    builder = relax.BlockBuilder()
    inner = [relax.Var("given", value.ty) for value in chain.given]
    known: dict[relax.Expr, relax.Expr] = dict(zip(chain.given, inner, strict=True))
    names = [str(one.name_hint) for one in chain.functions]
    name = "_".join(("fused", *(one.removeprefix("fused_") for one in names)))
    with builder.function(name, inner, attrs={"Primitive": 1}, private=True):
        with builder.dataflow():
            for binding, called in zip(chain.bindings, names, strict=True):
                arguments = [known[argument] for argument in binding.value.args[1]]
                function = builder.add_func(module[_function(binding)], called)
                known[binding.var] = builder.emit(relax.call_tir(function, arguments, binding.var.ty))
            result = builder.emit_output(known[chain.bindings[-1].var])
        whole = builder.emit_func_output(result)
    outer = [relax.Var("given", value.ty) for value in chain.given]
    with builder.function("main", outer):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(whole, outer))
        builder.emit_func_output(result)
    fused = relax.transform.FuseTIR()(builder.get())
    fused = relax.transform.DeadCodeElimination()(fused)
    return name, next(func for func in fused.functions.values() if isinstance(func, tirx.PrimFunc))
