"""Splits long sums into blocks of terms, then the sums of the blocks, and so on; and finds these sums.

An accumulator that takes n terms one by one errs by up to n u of the sum of their magnitudes (u: half the
distance from 1 to the next number, 2^-24 in float32), and by nearly as much where the terms are alike, as
each addition is then rounded the same way. In blocks no term passes through more than `additions(n)`
roundings, which takes the place of n in that bound (Higham, "Accuracy and Stability of Numerical Algorithms",
2nd edition, 4.2: a sum errs by at most h u of the sum of magnitudes, to first order, where no term passes
through more than h additions). Sums of many terms are found in the loops of a lowered function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, s_tir, tirx
from tvm.tirx.analysis import undefined_vars
from tvm_ffi import structural_equal, structural_map

from .statements import loads, nodes, parts, reduced_axes, replace_statement, substitute, uses

LONGEST = 256  # Terms that one accumulator takes; longer sums are added up in blocks
BLOCK = 128  # Most terms of a block
LEAST = BLOCK // 4  # Fewest: below, the sums of the blocks would be as many as the terms


def block(extent: int, terms: int) -> int:
    """Return how many iterations of a loop over `extent` make a block.

    Each iteration adds `terms` terms (at most BLOCK). The result is a divisor of `extent` where one gives
    LEAST to BLOCK terms; otherwise it makes the last block little shorter than the others.
    """
    most = max(1, BLOCK // terms)
    if extent <= most:
        return extent
    divisor = next(d for d in range(most, 0, -1) if extent % d == 0)
    if divisor * terms >= LEAST:
        return divisor
    return math.ceil(extent / math.ceil(extent / most))


def additions(terms: int) -> int:
    """Return the most roundings that a term of a sum of `terms` passes through.

    All stages but the last have blocks of LEAST to BLOCK terms; the last has up to LONGEST.
    """
    stages, left = 0, terms
    while left > LONGEST:
        stages, left = stages + 1, math.ceil(left / LEAST)
    return min(terms, LONGEST + stages * BLOCK)


# Partial sums of one work-item. A plain sum waits for its loads, so that partial sums which spill cost
# little. A product's accumulators already fill the registers: only those too few to matter are doubled, and
# halves whose operands are held step by step, within a budget: two of them fit a register, and long sums of
# them lose most digits.
MOST_PARTIAL = 1024
MOST_PARTIAL_PRODUCTS = 8
MOST_PARTIAL_HALVES = 64
# Terms and sums of a turn. Adding the sums up takes as long for a half as multiplying a pair. Two share a
# register, beside those that the loop carries.
LEAST_OF_TURN, MOST_OF_TURN = 4, 24

_ONE_BY_ONE = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A statement without parts; the loops and the conditions around it, outermost first.

    Each condition comes with the number of these loops around it.
    """

    stmt: tirx.Stmt
    loops: tuple[tirx.For, ...] = ()
    conditions: tuple[tuple[int, ir.Expr], ...] = ()


@dataclass(frozen=True, slots=True)
class LongSum:
    """A store that adds `term` to an element again and again.

    `summed` are the loops around it that run over the terms. `block` iterations of the loop number `at` of
    `leaf.loops` are to be one block. `init` is the store that sets the element before the first term, where
    it is beside the sum.
    """

    leaf: Leaf
    term: ir.Expr
    summed: tuple[tirx.For, ...]
    at: int
    block: int
    init: Leaf | None


def find(loop: tirx.For, *, pairs: bool = False) -> LongSum | None:
    """Return the first sum to be staged whose outermost loop over terms is this one, or None.

    Such a sum has too many terms, or with `pairs` is of halves with several terms per turn (`stage_sums`).
    """
    leaves = list(_leaves(loop, Leaf(loop)))
    for leaf in leaves:
        term = _term(leaf.stmt)
        if term is None or not all(isinstance(one.extent, tirx.IntImm) for one in leaf.loops):
            continue
        summed = tuple(one for one in leaf.loops if not uses(leaf.stmt.indices, [one.loop_var]))
        if not summed or not summed[0].same_as(loop) or any(s.kind not in _ONE_BY_ONE for s in summed):
            continue
        place = _turn(leaf, term, summed) if pairs else None
        if place is None and math.prod(int(one.extent) for one in summed) > LONGEST:
            most = _most_partial(loop, leaf.stmt, term, [one.loop_var for one in summed])
            place = _place(leaf, most, summed)
        stores = [o for o in leaves if _stores_to(o.stmt, leaf.stmt.buffer)]
        inits = [o for o in stores if o is not leaf]
        if (
            place is not None
            and len(inits) <= 1
            and all(_is_init(o, leaf, summed) for o in inits)
            and _accesses(loop, leaf.stmt.buffer) == 2 + len(inits)
            and _is_known_outside(leaf, loop, summed)
        ):
            return LongSum(leaf, term, summed, *place, init=inits[0] if inits else None)
    return None


def is_product(parts: Iterable[ir.Expr | tirx.Stmt], along: Sequence[ir.Var]) -> bool:
    """Return whether terms of a sum combine several tensors, each read along the variables summed over."""
    read: list[ir.Expr] = []
    for load in (load for part in parts for load in loads(part)):
        if uses(load.indices, along) and not any(load.source.same_as(other) for other in read):
            read.append(load.source)
    return len(read) > 1


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of an unscheduled function: its number of terms, and whether they are products."""

    terms: int
    product: bool


def reductions(func: tirx.PrimFunc) -> list[Reduction]:
    """Return all reductions of an unscheduled function."""
    found: list[Reduction] = []
    for block in nodes(func.body, s_tir.SBlock):
        if over := reduced_axes(block):
            terms = math.prod(int(axis.dom.extent) for axis in over)
            found.append(Reduction(terms, is_product([block.body], [axis.var for axis in over])))
    return found


def most_additions(func: tirx.PrimFunc) -> int:
    """Return the most additions that a term of any reduction of an unscheduled function passes through.

    The result is at least 1. Products count as if they were added up one by one, which schedules with many
    accumulators do.
    """
    passed = [one.terms if one.product else additions(one.terms) for one in reductions(func)]
    return max(passed, default=1)


def conjuncts(condition: ir.Expr) -> list[ir.Expr]:
    """Return the conditions that must hold together."""
    if isinstance(condition, tirx.And):
        return [*conjuncts(condition.a), *conjuncts(condition.b)]
    if isinstance(condition, ir.Call) and str(getattr(condition.op, "name", "")).endswith(".likely"):
        return conjuncts(condition.args[0])
    return [condition]


def _leaves(stmt: tirx.Stmt, around: Leaf) -> Iterator[Leaf]:
    loops, conditions = around.loops, around.conditions
    if isinstance(stmt, tirx.IfThenElse):
        holding = tuple((len(loops), one) for one in conjuncts(stmt.condition))
        yield from _leaves(stmt.then_case, Leaf(stmt, loops, conditions + holding))
        if stmt.else_case is not None:
            not_holding = ((len(loops), tirx.Not(stmt.condition)),)
            yield from _leaves(stmt.else_case, Leaf(stmt, loops, conditions + not_holding))
        return
    within = parts(stmt)
    if not within:
        yield Leaf(stmt, loops, conditions)
    inner = (*loops, stmt) if isinstance(stmt, tirx.For) else loops
    for part in within:
        yield from _leaves(part, Leaf(stmt, inner, conditions))


def _term(stmt: tirx.Stmt) -> ir.Expr | None:
    """Return the term that a store adds to the float that it overwrites; None where it does anything else."""
    if not isinstance(stmt, tirx.BufferStore) or not isinstance(stmt.value, tirx.Add):
        return None
    if "float" not in str(stmt.buffer.dtype):
        return None
    for old, term in ((stmt.value.a, stmt.value.b), (stmt.value.b, stmt.value.a)):
        if isinstance(old, ir.TensorLoad) and old.source.same_as(stmt.buffer):
            return term if structural_equal(list(old.indices), list(stmt.indices)) else None
    return None


def _most_partial(loop: tirx.For, store: tirx.BufferStore, term: ir.Expr, along: Sequence[ir.Var]) -> int:
    """Return how many partial sums a work-item may hold.

    An operand copied in the loop counts as its source.
    """
    operands = loads(term)
    if is_product(operands, along):
        return MOST_PARTIAL_PRODUCTS
    read: list[ir.Expr] = []
    stores = nodes(loop, tirx.BufferStore)
    for load in operands:
        read += [s.value for s in stores if _stores_to(s, load.source)] or [load]
    if not is_product(read, along):
        return MOST_PARTIAL
    return MOST_PARTIAL_HALVES if str(store.buffer.dtype) == "float16" else MOST_PARTIAL_PRODUCTS


def _place(leaf: Leaf, most: int, summed: Sequence[tirx.For]) -> tuple[int, int] | None:
    """Return which loop to cut into blocks, and of how many iterations.

    Return None where that takes too many partial sums.
    """
    terms, partial = 1, 1
    found = None
    for at in reversed(range(len(leaf.loops))):
        loop = leaf.loops[at]
        if not any(loop.same_as(one) for one in summed):
            partial *= int(loop.extent)
            if partial > most:
                break
            continue
        cut = block(int(loop.extent), terms)
        found, terms = (at, cut), terms * cut
        if cut < int(loop.extent):
            break
    return found if terms >= LEAST else None


def _turn(leaf: Leaf, term: ir.Expr, summed: Sequence[tirx.For]) -> tuple[int, int] | None:
    """Return the outermost loop over terms that is unrolled in a turn of another, and its extent.

    Return None where a turn has too few products of vectors of halves to pay, or too many sums.
    """
    if str(leaf.stmt.buffer.dtype) != "float16" or leaf.loops[-1].kind != tirx.ForKind.VECTORIZED:
        return None
    factors = [term.a, term.b] if isinstance(term, tirx.Mul) else []
    read = [one.indices[-1] for one in factors if isinstance(one, ir.TensorLoad)]
    if len(read) < 2 or not uses(read, [leaf.loops[-1].loop_var]):  # Gathered lanes are no pairs
        return None
    written = len(leaf.loops) - 1
    while written > 0 and leaf.loops[written - 1].kind == tirx.ForKind.UNROLLED:
        written -= 1
    over = [n for n, one in enumerate(leaf.loops) if any(one.same_as(each) for each in summed)]
    at = next((n for n in over if n >= written), None)
    if at is None or at == over[0]:
        return None
    terms = math.prod(int(leaf.loops[n].extent) for n in over if n >= at)
    sums = math.prod(int(one.extent) for one in leaf.loops[at:]) // terms
    return (at, int(leaf.loops[at].extent)) if terms >= LEAST_OF_TURN and sums <= MOST_OF_TURN else None


def _stores_to(stmt: tirx.Stmt, buffer: ir.Var) -> bool:
    return isinstance(stmt, tirx.BufferStore) and bool(stmt.buffer.same_as(buffer))


def _accesses(loop: tirx.For, buffer: ir.Var) -> int:
    """Return how often a buffer is declared as read or written, within a loop."""
    named = [load.source for load in loads(loop)] + [store.buffer for store in nodes(loop, tirx.BufferStore)]
    return sum(bool(one.same_as(buffer)) for one in named)


def _is_init(other: Leaf, leaf: Leaf, summed: Sequence[tirx.For]) -> bool:
    """Return whether a store sets a sum's element in the first iteration of all loops over its terms."""
    first = [_first_of(condition) for _, condition in other.conditions]
    return (
        len(other.loops) == len(leaf.loops)
        and all(a.same_as(b) for a, b in zip(other.loops, leaf.loops, strict=True))
        and structural_equal(list(other.stmt.indices), list(leaf.stmt.indices))
        and not uses([other.stmt.value], [one.loop_var for one in summed])
        and all(
            any(v is not None and v.same_as(s.loop_var) for v in first) for s in summed if int(s.extent) > 1
        )
    )


def _first_of(condition: ir.Expr) -> ir.Var | None:
    """Return the variable that a condition requires to be 0, or None."""
    if isinstance(condition, tirx.EQ) and isinstance(condition.b, tirx.IntImm) and not int(condition.b):
        return condition.a if isinstance(condition.a, ir.Var) else None
    return None


def _is_known_outside(leaf: Leaf, loop: tirx.For, summed: Sequence[tirx.For]) -> bool:
    """Return whether the element added to, and the time of adding, are known outside the loops over terms.

    A condition may depend on the terms or on the element, but not on both.
    """
    over = [one.loop_var for one in summed]
    others = [one.loop_var for one in leaf.loops if not any(one.same_as(s) for s in summed)]
    known = [*over, *others, *undefined_vars(loop, [])]
    expressions = [*leaf.stmt.indices, *(condition for _, condition in leaf.conditions)]
    used = [v for one in expressions for v in undefined_vars(one, [])]
    return (
        all(any(v.same_as(k) for k in known) for v in used)
        and not any(loads(one) for one in expressions)
        and not any(uses([one], over) and uses([one], others) for one in expressions)
    )


# A loop that adds many terms to the same element adds a block of them to a private partial sum, and that to
# the element; `sums` says how long a block is and what is won. It is done to the loops of the scheduled
# function, whatever made the schedule, so that it holds for every kernel and no schedule has to know of it:
#
#     for k in range(4096):                 for b in range(32):
#         sum[i] = sum[i] + x[i, k]             part[0] = 0.0
#                                               for k in range(128):
#                                                   part[0] = part[0] + x[i, b * 128 + k]
#                                               sum[i] = sum[i] + part[0]
#
# The sums of the blocks may be a long sum again, which is rewritten in turn.

_WRITTEN_OUT = 16  # Partial sums, which then stay in registers whatever the compiler does


def stage_sums(*, pairs: bool = False) -> tvm.transform.Pass:
    """Return the pass; it takes functions with blocks already lowered and buffers not yet flattened.

    With `pairs` a loop that carries sums of halves adds the terms of a turn up first. Mesa before 26.1 knows
    no pairs among the halves that a loop carries, and multiplies each by itself; those of a turn go in pairs.
    """

    def stage_loop(stmt: tirx.Stmt) -> tirx.Stmt:
        while isinstance(stmt, tirx.For) and (long := find(stmt, pairs=pairs)) is not None:
            stmt = _rewrite(stmt, long)
        return stmt

    def stage(func: tirx.PrimFunc, _module: ir.IRModule, _context: object) -> tirx.PrimFunc:
        return func.with_body(structural_map(func.body, [(tirx.For, stage_loop)], order="pre"))

    return tirx.transform.prim_func_pass(stage, opt_level=0, name="honed.StageSums")


def _rewrite(loop: tirx.For, long: LongSum) -> tirx.Stmt:
    """Return the loop with a sum in blocks, after the sum's initial store if the loop contained it."""
    result = replace_statement(loop, long.leaf.loops[long.at], _in_blocks(long))
    if long.init is None:
        return result
    return tirx.SeqStmt([_for_each_element(long, long.init, 0, long.init.stmt), result])


def _in_blocks(long: LongSum) -> tirx.Stmt:
    """Return the loop that is cut, as blocks."""
    cut, store, within = long.leaf.loops[long.at], long.leaf.stmt, long.at + 1
    elements = _elements(long, within)
    shape = [int(one.extent) for one in elements] or [1]
    part = tirx.decl_buffer(shape, store.buffer.dtype, f"{store.buffer.name}_part", scope="local")
    at = [one.loop_var for one in elements] or [tirx.const(0, "int32")]
    partial, whole = tirx.BufferLoad(part, at), tirx.BufferLoad(store.buffer, list(store.indices))
    begin = tirx.BufferStore(part, tirx.const(0, store.buffer.dtype), at)
    end = tirx.BufferStore(store.buffer, whole + partial, list(store.indices))
    body = replace_statement(cut.body, store, tirx.BufferStore(part, partial + long.term, at))
    if long.init is not None:
        body = replace_statement(body, long.init.stmt, tirx.Evaluate(0))

    dtype, extent = cut.loop_var.ty.dtype, int(cut.extent)

    def block(number: ir.Expr) -> tirx.Stmt:
        first = number * long.block
        length = tirx.const(long.block, dtype)
        if extent % long.block:  # The last one is shorter
            length = tirx.Min(length, extent - first)
        return tirx.SeqStmt(
            [
                _for_each_element(long, long.leaf, within, begin),
                _repeat(cut, length, lambda n: substitute(body, {cut.loop_var: first + n})),
                _for_each_element(long, long.leaf, within, end),
            ]
        )

    count = tirx.const(math.ceil(extent / long.block), dtype)
    return tirx.SeqStmt([tirx.AllocBuffer(part), _repeat(cut, count, block)])


def _repeat(like: tirx.For, count: ir.Expr, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    """Return a loop of the kind of `like`, with the body that `body` makes from its variable."""
    known = isinstance(count, tirx.IntImm)
    zero = tirx.const(0, like.loop_var.ty.dtype)
    if known and int(count) == 1:
        return body(zero)
    var = tirx.Var(like.loop_var.name, like.loop_var.ty.dtype)
    kind = like.kind if known else tirx.ForKind.SERIAL
    return tirx.For(var, zero, count, kind, body(var), annotations=like.annotations)


def _elements(long: LongSum, within: int) -> list[tirx.For]:
    """Return the loops over elements, from loop number `within` on."""
    return [one for one in long.leaf.loops[within:] if not any(one.same_as(s) for s in long.summed)]


def _for_each_element(long: LongSum, leaf: Leaf, within: int, stmt: tirx.Stmt) -> tirx.Stmt:
    """Return `stmt` for all elements that loops from number `within` on cover, under their conditions."""
    over = [one.loop_var for one in long.summed]
    for depth, condition in reversed(leaf.conditions):
        if depth >= within and not uses([condition], over):
            stmt = tirx.IfThenElse(condition, stmt, None)
    loops = _elements(long, within)
    fresh = {one.loop_var: tirx.Var(one.loop_var.name, one.loop_var.ty.dtype) for one in loops}
    stmt = substitute(stmt, fresh)
    count = 1
    for one in reversed(loops):
        count *= int(one.extent)
        kind = one.kind
        if kind == tirx.ForKind.SERIAL and count <= _WRITTEN_OUT:
            kind = tirx.ForKind.UNROLLED
        stmt = tirx.For(fresh[one.loop_var], one.min, one.extent, kind, stmt)
    return stmt
