"""Fuses functions: keeps moves out of fused functions, turns chains into one function, and traces calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, relax, s_tir, tirx
from tvm.ir import IRModule

from honed.tuner.lower.statements import is_call, loads, nodes, reduced_axes

from .views import bindings, cut_at, extents, is_fixed, readers, variables

# The operators that each call of a fused module computes. Fusing makes new functions, one for all equal
# calls, and new variables. The operators of a call are found by following it into its function: an operator
# is identified by what it calls and its operands, as equal ones were merged before.

Traced = Mapping[relax.Var, tuple[relax.Var, ...]]  # Variables of operators, by the variable of their call
Known = dict[relax.Var, Hashable]


def trace(plain: relax.Function, fused: IRModule) -> Traced:
    """Return, by each variable of a fused module's `main`, the variables of the unfused one it computes."""
    operators: dict[Hashable, relax.Var] = {}  # Views of one value are equal operators

    def follow(function: relax.Function, keys: Known) -> Traced:
        """Return the operators of a function whose parameters are known, and add its variables to `keys`."""
        found: dict[relax.Var, tuple[relax.Var, ...]] = {}
        for binding in bindings(function):
            var, value = binding.var, binding.value
            if not isinstance(value, relax.Call):
                keys[var] = _key(value, keys)
            elif isinstance(value.op, ir.GlobalVar):
                called = fused[value.op]
                within: Known = {p: _key(a, keys) for p, a in zip(called.params, value.args, strict=True)}
                found[var] = tuple(one for made in follow(called, within).values() for one in made)
                keys[var] = _key(called.body.body, within)
            else:
                operator = keys[var] = operators.setdefault(_operator(value, keys), var)
                found[var] = (operator,)
        return found

    follow(plain, {})
    return follow(fused["main"], {})


def rebind(
    function: relax.Function, become: Callable[[relax.Binding], Sequence[relax.Binding]]
) -> relax.Function:
    """Return the function with each of its bindings replaced by those that `become` gives for it."""
    blocks = [
        type(block)([new for one in block.bindings for new in become(one)]) for block in function.body.blocks
    ]
    whole = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, whole, function.ret_ty, function.is_pure, function.attrs)


def _operator(call: relax.Call, keys: Known) -> Hashable:
    return str(call.op.name), tuple(_key(argument, keys) for argument in call.args), str(call.attrs)


def _key(expr: relax.Expr, keys: Known) -> Hashable:
    """Return a key that is equal for equal values; a constant is equal to itself alone."""
    found: Hashable = expr
    if isinstance(expr, relax.Var):
        return keys.get(expr, found)
    if isinstance(expr, ir.GlobalVar):
        return str(expr.name_hint)
    if isinstance(expr, relax.Tuple):
        return tuple(_key(field, keys) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        whole = _key(expr.tuple_value, keys)
        found = whole[expr.index] if isinstance(whole, tuple) else (whole, int(expr.index))
    return found


# Concatenations and slices that could be in place are kept out of fused functions, where that pays. The
# program decides whether they are in place (`move_in_place`); here a function is only marked as a move. A
# concatenation that is fused with its producer or reader costs no launch of its own, and stays fused unless
# separating it adds no launch and reduces the bytes moved.

_OFFSETS, _CUTS = "honed.move.offsets", "honed.move.cuts"
_OPAQUE = 8  # An OpPatternKind of relax.analysis: fused with nothing
# Operators that need no launch by themselves.
_RESHAPES = frozenset({"relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten"})


@dataclass(frozen=True, slots=True)
class Move:
    """The action of a function that only moves: it concatenates its operands or slices (`cuts`) one operand.

    `offsets` (bytes) say where each operand begins in the result, or the result in the operand.
    """

    offsets: tuple[int, ...]
    cuts: bool


def move_of(function: tirx.PrimFunc) -> Move | None:
    """Return the move that a function is separate for; None for any other function."""
    if not isinstance(function, tirx.PrimFunc) or not function.attrs or _OFFSETS not in function.attrs:
        return None
    return Move(tuple(int(n) for n in function.attrs[_OFFSETS]), bool(function.attrs[_CUTS]))


def fuse(module: IRModule) -> tuple[IRModule, Traced]:
    """Return a module, annotated for fusion, with its operators fused, and the operators of each call.

    Operators are kept separate where an element of the fused function would read more than _MOST_READ others.
    """
    reads: dict[str, tuple[int, ...]] = {}
    while True:
        found = relax.transform.FuseOps()(module)
        traced = trace(module["main"], found)
        if not (apart := _too_large(module, traced.values(), reads)):
            return found, traced
        module = _with_functions(module, dict.fromkeys(apart))


# An operator of a fused function is computed where the next reads it, once for each time that it is read. An
# erf reads its operand forty times: a chain of four of them makes 2.5 million reads. Operands of conditions
# count more, because TVM simplifies the expression once more under each condition.
_MOST_READ = 512
_FOR_CONDITION = 8
_REDUCES = 3  # An OpPatternKind of relax.analysis: this and higher ones are stored before they are read


def _too_large(
    module: IRModule, groups: Iterable[Sequence[relax.Var]], reads: dict[str, tuple[int, ...]]
) -> set[relax.Var]:
    """Return the operators to keep separate so that no group is too large.

    `reads` has, by functions' names, how often an element reads each operand; missing ones are added.
    """
    calls = {b.var: b.value for b in bindings(module["main"])}
    found: set[relax.Var] = set()
    for group in groups:
        # Reads of an element whose operators are computed where they are read
        within: dict[relax.Var, int] = {}
        for var in group if len(group) > 1 else ():
            call: Any = calls.get(var)
            if not is_call(call, "relax.call_tir"):
                continue
            name, function = str(call.args[0].name_hint), module[call.args[0]]
            if name not in reads:
                reads[name] = _reads(function)
            own = list(zip(call.args[1], reads[name], strict=False))
            least = sum(times for _, times in own)
            whole = sum(times * within.get(given, 1) for given, times in own)
            if whole > max(_MOST_READ, least):
                found.add(var)
            elif int(function.attrs.get("op_pattern", _OPAQUE)) < _REDUCES:
                within[var] = max(1, whole)
    return found


def fuse_without_moves(annotated: IRModule, operators: IRModule, alignment: int) -> tuple[IRModule, Traced]:
    """Return `fused` of a module with separate functions for moves that are better not fused.

    `operators` is the module before legalisation; both modules share their variables. Values can lie within
    others at multiples of `alignment` (bytes).
    """
    calls = {b.var: b.value for b in bindings(operators["main"]) if isinstance(b.value, relax.Call)}
    main = annotated["main"]
    graph = _Graph(
        calls=calls,
        given={b.var: tuple(variables(b.value)) for b in bindings(main)},
        outside={*main.params, *result_variables(annotated)},
    )
    left = {var: move for var in calls if (move := graph.move(var, alignment)) is not None}
    apart: dict[relax.Var, Move] = {}
    while True:
        made, traced = fuse(_with_functions(annotated, apart) if apart else annotated)
        paying = [
            next((one for one in group if one in left and graph.pays(one, group, left[one])), None)
            for group in (traced.values() if left else ())
        ]
        chosen = {one: left.pop(one) for one in paying if one is not None}
        if not chosen:
            return made, traced
        apart |= chosen


@dataclass(frozen=True, slots=True)
class _Graph:
    """The operators of `main` by their variables, with operands, and the variables visible from outside."""

    calls: Mapping[relax.Var, relax.Call]
    given: Mapping[relax.Var, tuple[relax.Var, ...]]
    outside: set[relax.Var]

    def move(self, var: relax.Var, alignment: int) -> Move | None:
        """Return the move that an operator could make in place.

        None where it moves nothing or cannot do so.
        """
        call = self.calls[var]
        name = str(getattr(call.op, "name", ""))
        found: Move | None = None
        if name == "relax.concat" and isinstance(call.args[0], relax.Tuple):
            parts = list(call.args[0].fields)
            known = all(isinstance(one, relax.Var) and is_fixed(one) for one in parts)
            if known and len(set(parts)) == len(parts) and not any(map(self._is_given, parts)):
                found = _find_join([extents(one) for one in parts], int(call.attrs.axis), _itemsize(parts[0]))
        elif name == "relax.strided_slice" and is_fixed(call.args[0]) and var not in self.outside:
            elements = cut_at(call)
            found = None if elements is None else Move((elements * _itemsize(call),), cuts=True)
        if found is None or any(offset % alignment for offset in found.offsets):
            return None
        return found

    def pays(self, var: relax.Var, group: Iterable[relax.Var], move: Move) -> bool:
        """Return whether setting a move apart pays.

        It pays where the operators fused with the move need no more launches without it, and fewer bytes are
        moved.
        """
        others = set(group) - {var}
        launched = {one for one in others if not self._reshapes(one)}
        if not launched:
            return True
        given = {one: others.intersection(self.given.get(one, ())) for one in (var, *others)}
        joined = _reach(
            [next(iter(launched))], lambda one: given[one] | {two for two in others if one in given[two]}
        )
        return not move.cuts and launched <= joined <= _reach([var], given.__getitem__)

    def _is_given(self, var: relax.Var) -> bool:
        """Return whether a variable is an input, an output or a constant of the model, perhaps reshaped."""
        while var not in self.outside and self._reshapes(var) and self.given.get(var):
            var = self.given[var][0]
        return var in self.outside or not self.given.get(var)

    def _reshapes(self, var: relax.Var) -> bool:
        return var in self.calls and str(getattr(self.calls[var].op, "name", "")) in _RESHAPES


def _reach(start: Iterable[relax.Var], steps: Callable[[relax.Var], Iterable[relax.Var]]) -> set[relax.Var]:
    """Return the variables that some number of steps leads to, none included."""
    found, new = set[relax.Var](), set(start)
    while new:
        found |= new
        new = {two for one in new for two in steps(one)} - found
    return found


def _find_join(parts: Sequence[Sequence[int]], axis: int, itemsize: int) -> Move | None:
    """Return the move that joins tensors along an axis; None where they are not one after another."""
    axis %= len(parts[0])
    sizes = [math.prod(one) * itemsize for one in parts]
    if math.prod(parts[0][:axis]) != 1 or not all(sizes):
        return None
    return Move(tuple(sum(sizes[:n]) for n in range(len(sizes))), cuts=False)


def _itemsize(expr: relax.Expr) -> int:
    return np.dtype(str(expr.ty.dtype)).itemsize


def _reads(function: tirx.PrimFunc) -> tuple[int, ...]:
    """Return how often an element that a function makes reads each of its parameters."""
    read = [load.source for load in loads(function.body)]
    for choice in nodes(function.body, tirx.Select):
        read += (_FOR_CONDITION - 1) * [load.source for load in loads(choice.condition)]
    return tuple(sum(map(one.same_as, read)) for one in function.params)


def _with_functions(module: IRModule, moves_by_var: Mapping[relax.Var, Move | None]) -> IRModule:
    """Return the module in which calls have functions that are not fused, marked with their move, if any."""
    builder = relax.BlockBuilder(module)

    def rewrite(binding: relax.Binding) -> list[relax.Binding]:
        if binding.var not in moves_by_var:
            return [binding]
        move = moves_by_var[binding.var]
        called, given = binding.value.args[0], binding.value.args[1]
        function = module[called].with_attr("op_pattern", _OPAQUE)
        if move is not None:
            function = function.with_attr(_OFFSETS, list(move.offsets)).with_attr(_CUTS, int(move.cuts))
        name = builder.add_func(function, str(called.name_hint))
        made = builder.normalize(relax.call_tir(name, given, binding.var.ty))
        return [relax.VarBinding(binding.var, made)]

    builder.update_func(module.get_global_var("main"), rebind(module["main"], rewrite))
    return builder.get()


def result_variables(module: IRModule) -> set[relax.Var]:
    """Return the variables from which the result of `main` is made without an operator."""
    made = {b.var: b.value for b in bindings(module["main"]) if not isinstance(b.value, relax.Call)}
    result = variables(module["main"].body.body)
    return _reach(result, lambda one: variables(made[one]) if one in made else ())


# Chains of functions as one function, which TVM fuses only separately: attentions, convolutions of each
# channel by itself with the pointwise one that reads them, and norms of one row with the products of it.

_Form = tuple[object, ...]
_BLOCKED_AXES = 5  # Axes of images whose channels lie in blocks
_MATRIX_AXES = 2
FEW_ROWS = 8  # Rows of a batch: with up to this many in an attention a group may have one row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedFunction:
    """A function of a module. `constants` are the parameters that are constants in all its calls."""

    name: str
    func: tirx.PrimFunc
    constants: frozenset[int]
    outputs: int  # Number of its last parameters that are outputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusionCandidate:
    """A chain of functions, each read by the next alone, and the one that could replace it."""

    unfused: tuple[NamedFunction, ...]
    fused: NamedFunction
    calls: int  # Number of calls in `main`


Joins = Callable[[FusionCandidate], bool]  # Decides whether to fuse the functions


def never(_forms: FusionCandidate) -> bool:
    """Return False: no functions are fused."""
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Calls that may be one function, in order: each is read by the next alone, or none by another."""

    bindings: tuple[relax.VarBinding, ...]

    @property
    def functions(self) -> list[ir.GlobalVar]:
        """The functions that the calls run, in order."""
        return [_function(binding) for binding in self.bindings]

    @property
    def inputs(self) -> list[relax.Expr]:
        """The values that the calls read and none of them makes, each once."""
        made = {binding.var for binding in self.bindings}
        read = (argument for binding in self.bindings for argument in binding.value.args[1])
        return [argument for argument in dict.fromkeys(read) if argument not in made]

    @property
    def results(self) -> list[relax.Var]:
        """The results that none of the calls reads."""
        read = {argument for binding in self.bindings for argument in binding.value.args[1]}
        return [binding.var for binding in self.bindings if binding.var not in read]

    @property
    def form(self) -> _Form:
        """A key that is equal for chains that become one and the same function."""
        names = {value: n for n, value in enumerate((*self.inputs, *(b.var for b in self.bindings)))}
        read = [tuple(names[argument] for argument in binding.value.args[1]) for binding in self.bindings]
        return tuple(str(one.name_hint) for one in self.functions), tuple(read)


def join_functions(module: IRModule, joins: Joins, *, rows: bool) -> tuple[IRModule, Traced]:
    """Return a module of fused functions in which each chain of `main` accepted by `joins` is one function.

    With `rows` there are chains of products of one row, and of attentions of few rows with the calls that
    make these. Also return, by the variable of each such call, the variables of the calls that it replaces.
    """
    chains = list(_chains(module, rows=rows))
    alike: dict[_Form, list[Chain]] = {}
    for chain in chains:
        alike.setdefault(chain.form, []).append(chain)
    calls = list(_calls(module["main"]).values())

    def join(chain: Chain) -> tuple[str, tirx.PrimFunc] | None:
        forms = _forms(module, alike[chain.form], calls)
        return (forms.fused.name, forms.fused.func) if joins(forms) else None

    return replace_chains(module, chains, join)


def replace_chains(
    module: IRModule, chains: Iterable[Chain], join: Callable[[Chain], tuple[str, tirx.PrimFunc] | None]
) -> tuple[IRModule, Traced]:
    """Return a module in which each chain of `main` is one call, of the function that `join` names and gives.

    Chains of one form have the same function. A chain stays where there is none, or where one of its calls is
    in an earlier chain. Also return, by the variable of each such call, the variables that it replaces.
    """
    builder = relax.BlockBuilder(module)
    functions: dict[_Form, ir.GlobalVar | None] = {}
    new: dict[relax.Var, Sequence[relax.Binding]] = {}
    replaced: dict[relax.Var, tuple[relax.Var, ...]] = {}
    for chain in chains:
        calls = tuple(binding.var for binding in chain.bindings)
        if not new.keys().isdisjoint(calls):
            continue
        if chain.form not in functions:
            joined = join(chain)
            functions[chain.form] = None if joined is None else builder.add_func(joined[1], joined[0])
        if functions[chain.form] is None:
            continue
        var, results = calls[-1], chain.results
        fields: list[relax.Binding] = []
        if len(results) > 1:
            var = relax.Var("joined", relax.TupleType([one.ty for one in results]))
            fields = [relax.VarBinding(one, relax.TupleGetItem(var, n)) for n, one in enumerate(results)]
        call = relax.call_tir(functions[chain.form], chain.inputs, [one.ty for one in results])
        new |= dict.fromkeys(calls, ()) | {calls[-1]: [relax.VarBinding(var, call), *fields]}
        replaced[var] = calls
    if not replaced:
        return module, {}
    changed = rebind(module["main"], lambda one: new.get(one.var, [one]))
    builder.update_func(module.get_global_var("main"), changed)
    return relax.transform.DeadCodeElimination()(builder.get()), replaced


def _chains(module: IRModule, *, rows: bool) -> Iterator[Chain]:
    """Yield chains of calls that may be one function.

    These are an attention, two convolutions of blocked tensors, or products of one row. In the first two each
    call is read by the next one only. An attention is a product, reductions of its rows, and another product,
    perhaps after the call that makes a few rows. The longest of several chains comes first.
    """
    calls, read = _calls(module["main"]), readers(module["main"])
    sums = {name: _sums(module[name]) for name in map(_function, calls.values())}

    def sources_of(binding: relax.VarBinding) -> Iterator[tuple[int, relax.VarBinding]]:
        """Yield the number of reductions, and the call, of each call whose result this call alone reads."""
        for argument in binding.value.args[1]:
            if argument in calls and read[argument] == 1:
                yield len(sums[_function(calls[argument])]), calls[argument]

    for last in calls.values():
        if len(sums[_function(last)]) == 1:
            yield from _kernels(module, last, sources_of, rows=rows)
        if rows:
            yield from _products_of_a_row(last, calls, read, sums)


def _kernels(
    module: IRModule,
    last: relax.VarBinding,
    made_for: Callable[[relax.VarBinding], Iterator[tuple[int, relax.VarBinding]]],
    *,
    rows: bool,
) -> Iterator[Chain]:
    """Yield the chains that end with a call and may be an attention, or two convolutions."""
    for several, middle in made_for(last):
        if several > 1:
            for single, first in made_for(middle):
                if single != 1:
                    continue
                for none, turn in made_for(first):
                    if rows and not none and _has_few_rows(turn.var, first.var):
                        yield Chain((turn, first, middle, last))
                yield Chain((first, middle, last))
        elif (
            several == 1
            and _axes(last) == _axes(middle) == _BLOCKED_AXES
            and _is_pointwise(module[_function(last)])
        ):
            yield Chain((middle, last))


def _is_pointwise(func: tirx.PrimFunc) -> bool:
    """Return whether the window of a convolution, whose channels lie in blocks, has one element."""
    summed = (reduced_axes(block) for block in nodes(func.body, s_tir.SBlock))
    return any([getattr(axis.dom.extent, "value", 0) for axis in axes[1:-1]] == [1, 1] for axes in summed)


def _has_few_rows(value: relax.Var, scores: relax.Var) -> bool:
    """Return whether scores have few rows a batch, and a value no more rows than they have."""
    if not is_fixed(value) or not is_fixed(scores) or len(extents(scores)) < _MATRIX_AXES:
        return False
    *batches, rows, _ = extents(scores)
    return rows <= FEW_ROWS and math.prod(extents(value)[:-1]) <= math.prod(batches) * rows


def _products_of_a_row(
    last: relax.VarBinding,
    calls: Mapping[relax.Var, relax.VarBinding],
    read: Mapping[relax.Var, int],
    sums: Mapping[ir.GlobalVar, Sequence[int]],
) -> Iterator[Chain]:
    """Yield the chain that ends with a product of one row, if it may be one function with its operands.

    These are another product of the row, which this one alone reads, or a norm that makes the row for them
    alone, or both.
    """

    def is_product(binding: relax.VarBinding) -> bool:
        return min(sums[_function(binding)], default=1) > 1 and _is_row(binding.var)

    if not is_product(last):
        return
    given = set(last.value.args[1])
    alone = (calls[one] for one in last.value.args[1] if one in calls and read[one] == 1)
    beside = next((one for one in alone if is_product(one) and not given.isdisjoint(one.value.args[1])), None)
    products = (last,) if beside is None else (beside, last)
    rows = (one for one in last.value.args[1] if all(one in set(made.value.args[1]) for made in products))
    norms = (calls[row] for row in rows if row in calls and read[row] == len(products) and _is_row(row))
    norm = next((one for one in norms if max(sums[_function(one)], default=0) == 1), None)
    chain = products if norm is None else (norm, *products)
    if len(chain) > 1:
        yield Chain(chain)


def _is_row(value: relax.Var) -> bool:
    """Return whether a tensor has one axis of more than one element."""
    extents_ = extents(value) if is_fixed(value) else ()
    return sum(extent > 1 for extent in extents_) == 1


def _axes(binding: relax.VarBinding) -> int:
    """Return the number of axes of a call's result; 0 where it has no shape."""
    return len(binding.var.ty.shape) if hasattr(binding.var.ty, "shape") else 0


def _calls(main: relax.Function) -> dict[relax.Var, relax.VarBinding]:
    """Return the calls of functions, by their variables."""
    return {binding.var: binding for binding in bindings(main) if is_call(binding.value, "relax.call_tir")}


def _function(binding: relax.VarBinding) -> ir.GlobalVar:
    return binding.value.args[0]


def _sums(func: tirx.PrimFunc) -> tuple[int, ...]:
    """Return the number of elements that each reducing block of a function makes; 0 where it varies."""
    blocks = (block for block in nodes(func.body, s_tir.SBlock) if reduced_axes(block))
    return tuple(math.prod(map(_extent, block.iter_vars)) for block in blocks)


def _extent(axis: tirx.IterVar) -> int:
    """Return the extent of an axis that is not reduced, 0 where it is not fixed; 1 for other axes."""
    if axis.iter_type != tirx.IterVar.DataPar:
        return 1
    return int(axis.dom.extent) if isinstance(axis.dom.extent, tirx.IntImm) else 0


def _forms(module: IRModule, chains: Sequence[Chain], calls: Sequence[relax.VarBinding]) -> FusionCandidate:
    """Return both variants of chains that become one function, in a `main` of these calls."""
    name, func = one_function(module, chains[0])
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
        constants=_constants([chain.inputs for chain in chains]),
        outputs=_outputs(chains[0].bindings[-1]),
    )
    return FusionCandidate(unfused=apart, fused=joined, calls=len(chains))


def _constants(calls: Sequence[Sequence[relax.Expr]]) -> frozenset[int]:
    """Return the numbers of the arguments that are constants in all calls of a function."""
    found = [{n for n, one in enumerate(given) if isinstance(one, ir.GenericConst)} for given in calls]
    return frozenset(set.intersection(*found))


def _outputs(binding: relax.VarBinding) -> int:
    """Return how many outputs a call has."""
    return len(getattr(binding.var.ty, "fields", (binding.var,)))


def one_function(module: IRModule, chain: Chain) -> tuple[str, tirx.PrimFunc]:
    """Return the function that the calls of a chain become, preceded by a name for it.

    It has an output for each result.
    """
    builder = relax.BlockBuilder()
    inner = [relax.Var("given", value.ty) for value in chain.inputs]
    known: dict[relax.Expr, relax.Expr] = dict(zip(chain.inputs, inner, strict=True))
    names = [str(one.name_hint) for one in chain.functions]
    name = "_".join(("fused", *(one.removeprefix("fused_") for one in names)))
    with builder.function(name, inner, attrs={"Primitive": 1}, private=True):
        with builder.dataflow():
            for binding, called in zip(chain.bindings, names, strict=True):
                arguments = [known[argument] for argument in binding.value.args[1]]
                function = builder.add_func(module[_function(binding)], called)
                known[binding.var] = builder.emit(relax.call_tir(function, arguments, binding.var.ty))
            results = [known[var] for var in chain.results]
            result = builder.emit_output(results[0] if len(results) == 1 else relax.Tuple(results))
        whole = builder.emit_func_output(result)
    outer = [relax.Var("given", value.ty) for value in chain.inputs]
    with builder.function("main", outer):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(whole, outer))
        builder.emit_func_output(result)
    fused = relax.transform.FuseTIR()(builder.get())
    fused = relax.transform.DeadCodeElimination()(fused)
    return name, next(func for func in fused.functions.values() if isinstance(func, tirx.PrimFunc))
