"""Concatenations and slices that could be in place are kept out of fused functions, where that pays.

Whether they are in place the program decides (`moved_in_place`); here a function is told that all it does is
to move. A concatenation that is fused with what makes or reads it costs no launch of its own, and stays so
unless without it no more launches are left, and less is moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx
from tvm.ir import IRModule

from .strided import cut_at, extents, is_fixed
from .tracing import bindings, rebound, trace

_OFFSETS, _CUTS = "honed.move.offsets", "honed.move.cuts"
_OPAQUE = 8  # of relax.analysis.OpPatternKind: fused with nothing
# What takes no launch by itself.
_RESHAPES = frozenset({"relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten"})


@dataclass(frozen=True, slots=True)
class Move:
    """What a function does that does nothing but move: it joins its operands or cuts (`cuts`) out of one.

    `offsets` (bytes) say where each operand begins in the result, or the result in the operand.
    """

    offsets: tuple[int, ...]
    cuts: bool


def move_of(function: tirx.PrimFunc) -> Move | None:
    """What it moves, where it was set apart."""
    if not isinstance(function, tirx.PrimFunc) or not function.attrs or _OFFSETS not in function.attrs:
        return None
    return Move(tuple(int(n) for n in function.attrs[_OFFSETS]), bool(function.attrs[_CUTS]))


def set_moves_apart(annotated: IRModule, operators: IRModule, alignment: int) -> IRModule:
    """The module, annotated for fusion, with functions of their own for moves that are better not fused.

    `operators` is the module before it was legalised, whose variables it has. Values can lie in others at
    multiples of `alignment` (bytes).
    """
    calls = {b.var: b.value for b in bindings(operators["main"]) if isinstance(b.value, relax.Call)}
    main = annotated["main"]
    graph = _Graph(
        calls=calls,
        given={b.var: tuple(_variables(b.value)) for b in bindings(main)},
        outside={*main.params, *_outputs(annotated)},
    )
    left = {var: move for var in calls if (move := graph.move(var, alignment)) is not None}
    apart: dict[relax.Var, Move] = {}
    found = annotated
    while left:
        groups = trace(found["main"], relax.transform.FuseOps()(found)).values()
        paying = [
            next((one for one in group if one in left and graph.pays(one, group, left[one])), None)
            for group in groups
        ]
        chosen = {one: left.pop(one) for one in paying if one is not None}
        if not chosen:
            break
        apart |= chosen
        found = _with_functions(annotated, apart)
    return found


@dataclass(frozen=True, slots=True)
class _Graph:
    """`main`: operators by their variables, what each is given, and the variables seen from outside."""

    calls: Mapping[relax.Var, relax.Call]
    given: Mapping[relax.Var, tuple[relax.Var, ...]]
    outside: set[relax.Var]

    def move(self, var: relax.Var, alignment: int) -> Move | None:
        """What an operator moves, were it in place; None where it does not, or cannot be."""
        call = self.calls[var]
        name = str(getattr(call.op, "name", ""))
        found: Move | None = None
        if name == "relax.concat" and isinstance(call.args[0], relax.Tuple):
            parts = list(call.args[0].fields)
            known = all(isinstance(one, relax.Var) and is_fixed(one) for one in parts)
            if known and len(set(parts)) == len(parts) and not any(map(self._is_given, parts)):
                found = _joined([extents(one) for one in parts], int(call.attrs.axis), _itemsize(parts[0]))
        elif name == "relax.strided_slice" and is_fixed(call.args[0]) and var not in self.outside:
            found = _cut(call)
        if found is None or any(offset % alignment for offset in found.offsets):
            return None
        return found

    def pays(self, var: relax.Var, group: Iterable[relax.Var], move: Move) -> bool:
        """Whether what is fused with a move takes no more launches without it, and less is moved."""
        others = set(group) - {var}
        parts = [part for part in self._components(others) if not all(map(self._reshapes, part))]
        if not parts:
            return True
        before = self._before(var, others)
        return not move.cuts and len(parts) == 1 and parts[0] <= before

    def _is_given(self, var: relax.Var) -> bool:
        """Whether it is an input, an output or a constant of the model, perhaps of another shape."""
        while var not in self.outside and self._reshapes(var) and self.given.get(var):
            var = self.given[var][0]
        return var in self.outside or not self.given.get(var)

    def _reshapes(self, var: relax.Var) -> bool:
        return var in self.calls and str(getattr(self.calls[var].op, "name", "")) in _RESHAPES

    def _components(self, among: set[relax.Var]) -> Iterator[set[relax.Var]]:
        """Variables that read each other, together."""
        left = set(among)
        beside: dict[relax.Var, set[relax.Var]] = {var: set() for var in among}
        for var in among:
            for one in self.given.get(var, ()):
                if one in among:
                    beside[var].add(one)
                    beside[one].add(var)
        while left:
            found, new = set[relax.Var](), {left.pop()}
            while new:
                found |= new
                new = {two for one in new for two in beside[one]} - found
            left -= found
            yield found

    def _before(self, var: relax.Var, among: set[relax.Var]) -> set[relax.Var]:
        """What a variable is made of."""
        found, new = set[relax.Var](), {var}
        while new:
            new = {two for one in new for two in self.given.get(one, ()) if two in among} - found
            found |= new
        return found


def _joined(parts: Sequence[Sequence[int]], axis: int, itemsize: int) -> Move | None:
    """Tensors joined along an axis, where they are one behind the other."""
    axis %= len(parts[0])
    sizes = [math.prod(one) * itemsize for one in parts]
    if math.prod(parts[0][:axis]) != 1 or not all(sizes):
        return None
    return Move(tuple(sum(sizes[:n]) for n in range(len(sizes))), cuts=False)


def _cut(call: relax.Call) -> Move | None:
    """A slice, where its elements are neighbours."""
    elements = cut_at(call)
    return None if elements is None else Move((elements * _itemsize(call),), cuts=True)


def _itemsize(expr: relax.Expr) -> int:
    return np.dtype(str(expr.ty.dtype)).itemsize


def _with_functions(module: IRModule, apart: Mapping[relax.Var, Move]) -> IRModule:
    """The module in which calls that move are of functions that say so."""
    builder = relax.BlockBuilder(module)

    def told(binding: relax.Binding) -> relax.Binding:
        move = apart.get(binding.var)
        if move is None:
            return binding
        called, given = binding.value.args[0], binding.value.args[1]
        function = module[called].with_attr("op_pattern", _OPAQUE)
        function = function.with_attr(_OFFSETS, list(move.offsets)).with_attr(_CUTS, int(move.cuts))
        name = builder.add_func(function, str(called.name_hint))
        made = builder.normalize(relax.call_tir(name, given, binding.var.ty))
        return relax.VarBinding(binding.var, made)

    builder.update_func(module.get_global_var("main"), rebound(module["main"], told))
    return builder.get()


def _outputs(module: IRModule) -> set[relax.Var]:
    """The variables that the result of `main` is made of without an operator."""
    made = {b.var: b.value for b in bindings(module["main"]) if not isinstance(b.value, relax.Call)}
    found, new = set[relax.Var](), set(_variables(module["main"].body.body))
    while new:
        found |= new
        new = {two for one in new if one in made for two in _variables(made[one])} - found
    return found


def _variables(expr: relax.Expr) -> Iterator[relax.Var]:
    found: list[relax.Var] = []
    relax.analysis.post_order_visit(expr, lambda e: found.append(e) if isinstance(e, relax.Var) else None)
    return iter(found)
