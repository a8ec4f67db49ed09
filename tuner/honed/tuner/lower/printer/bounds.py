"""Checks that each load and store of a kernel lies inside its buffer, by arithmetic on its indices.

It examines the kernel after all passes, with the semantics of the printed code: a statement's condition,
`if_then_else` and the second operand of `&&` guard what they choose, while both values of a `Select`, and
both of a choice by a vector of conditions, are computed. Where the guard of a `Select` is what keeps a load
inside, the choice is made lane by lane, by branches. Kernels with an access that still may lie outside are
refused.

TVM's intervals, with the guards in force, decide nearly all accesses; the rest is decided by cutting the
space of the variables into boxes, until each lies inside or is excluded by a guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import ir, sym, tirx
from tvm_ffi import WalkResult, structural_hash, structural_map, structural_walk

from honed.tuner.lower.statements import loads, memory_of, nodes

from . import terms
from .terms import Unprintable, lane

_MOST_BOXES = 1 << 13  # Boxes that one access is cut into
_INVERSE = {
    tirx.LT: tirx.GE,
    tirx.GE: tirx.LT,
    tirx.GT: tirx.LE,
    tirx.LE: tirx.GT,
    tirx.EQ: tirx.NE,
    tirx.NE: tirx.EQ,
}
_LANE = "lane"  # The key of a box's side for the lane of a vector

Numbers = npt.NDArray[np.float64]  # Whole numbers: exact to 2^53, and without limits beyond
Bounds = tuple[Numbers, Numbers]
Arithmetic = Callable[[Numbers, Numbers, Numbers, Numbers], Bounds]
Guard = tuple[Any, bool]  # A condition, and its value


class OutOfBounds(Unprintable):
    """Raised when a kernel may reach outside of its buffers."""


def bound_accesses(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the kernel with each load and store inside its buffer.

    Raises OutOfBounds where an access may lie outside.
    """
    kernel = _Kernel(func)
    kernel.walk(func.body)
    if kernel.outside:
        raise OutOfBounds(kernel.outside[0])
    if not kernel.branching:
        return func

    def branch(choice: Any) -> Any:
        return _by_lanes(choice) if any(choice.same_as(one) for one in kernel.branching) else choice

    return func.with_body(structural_map(func.body, [((tirx.Select, ir.Call), branch)], order="pre"))


class _Kernel:
    """The state of a walk through one kernel: the ranges of its variables, and the guards in force."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.outside: list[str] = []
        self.branching: list[Any] = []  # Choices that compute both values unless they become branches
        self.guards: list[Guard] = []
        # Ranges of variables: the first value, and the number of values
        self.ranges: dict[Any, tuple[Any, Any]] = {}
        self.definitions: dict[Any, Any] = {}
        self.stored = {store.buffer for store in nodes(func.body, tirx.BufferStore)}
        self._sizes: dict[Any, tuple[int, int]] = {}  # Elements of buffers, and bytes of one
        self.analyzer = sym.Analyzer()
        self._known: dict[tuple[int, ...], tuple[float, float]] = {}  # Bounds of indices under guards
        self._callbacks = [
            (tirx.AttrStmt, self._attribute),
            ((tirx.AllocBuffer, tirx.DeclBuffer), self._declare),
            ((tirx.Bind, tirx.Let), self._bind),
            (tirx.For, self._loop),
            (tirx.IfThenElse, self._condition),
            (tirx.BufferStore, lambda node: self._access(node.buffer, node.indices)),
            (ir.TensorLoad, lambda node: self._access(node.source, node.indices)),
            (
                tirx.Select,
                lambda node: self._walk_both(node, node.condition, node.true_value, node.false_value),
            ),
            (ir.Call, self._call),
            ((tirx.And, tirx.Or), self._both),
        ]

    def walk(self, root: Any) -> None:
        """Examine all accesses in a statement or an expression."""
        structural_walk(root, self._callbacks, order="pre")

    # Ranges and definitions of variables

    def _attribute(self, node: tirx.AttrStmt) -> None:
        if str(node.attr_key) == "thread_extent":
            self._counts(node.node.var, 0, node.value)

    def _counts(self, var: ir.Var, first: Any, extent: Any) -> None:
        if var in self.ranges:
            self._known.clear()
        self.ranges[var] = first, extent
        self.analyzer.bind(var, ir.Range.from_min_extent(first, extent), allow_override=True)

    def _declare(self, node: Any) -> None:
        of = terms.type_in_memory(terms.parse_type(str(node.buffer.dtype)))
        elements = math.prod(int(extent) for extent in node.buffer.shape)
        if isinstance(node, tirx.DeclBuffer) and (whole := self._sizes.get(memory_of(node.data))):
            elements = min(elements, whole[0] * whole[1] // of.nbytes)
        self._sizes[node.buffer] = elements, of.nbytes

    def _bind(self, node: tirx.Bind) -> None:
        of = terms.type_of(node.var)
        if node.var in self.definitions:
            self._known.clear()
        self.definitions[node.var] = node.value
        if of.integer and of.lanes == 1:
            self.analyzer.bind(node.var, node.value, allow_override=True)

    @contextmanager
    def _where(self, condition: Any, true: bool) -> Iterator[None]:
        """Treat everything walked within this context as reached only where the condition equals `true`."""
        before = len(self.guards)
        with ExitStack() as entered:
            for part, so in self._parts(condition, true):
                self.guards.append((part, so))
                if terms.type_of(part).lanes == 1 and (so or type(part) in _INVERSE):
                    known = part if so else _INVERSE[type(part)](part.a, part.b)
                    entered.enter_context(self.analyzer.constraint_scope(known))
            yield
        del self.guards[before:]

    def _parts(self, condition: Any, true: bool) -> Iterator[Guard]:
        """Yield the conditions that are determined where this one equals `true`, each with its value."""
        condition = self.meaning(condition)
        kind = type(condition)
        if kind is (tirx.And if true else tirx.Or):
            yield from self._parts(condition.a, true)
            yield from self._parts(condition.b, true)
        elif kind is tirx.Not:
            yield from self._parts(condition.a, not true)
        else:
            yield condition, true

    def meaning(self, expr: Any) -> Any:
        """Return the expression that another stands for: a variable, a hint, or the same in all lanes."""
        if type(expr) is tirx.Broadcast:
            return self.meaning(expr.value)
        if type(expr) is ir.Call and _name(expr) == "likely":
            return self.meaning(expr.args[0])
        return self.meaning(self.definitions[expr]) if expr in self.definitions else expr

    # Statements and choices

    def _loop(self, node: tirx.For) -> WalkResult:
        self.walk(node.min)
        self.walk(node.extent)
        self._counts(node.loop_var, node.min, node.extent)
        self.walk(node.body)
        return WalkResult.SKIP

    def _condition(self, node: tirx.IfThenElse) -> WalkResult:
        self._walk_selected(node.condition, node.then_case, node.else_case)
        return WalkResult.SKIP

    def _call(self, node: ir.Call) -> WalkResult | None:
        if _name(node) != "if_then_else":
            return None
        if _lanes(node.args[0]) > 1:
            return self._walk_both(node, *node.args)
        self._walk_selected(*node.args)
        return WalkResult.SKIP

    def _both(self, node: Any) -> WalkResult | None:
        if _lanes(node) > 1:
            return None
        self.walk(node.a)
        with self._where(node.a, type(node) is tirx.And):
            self.walk(node.b)
        return WalkResult.SKIP

    def _walk_selected(self, condition: Any, yes: Any, no: Any) -> None:
        """Walk a choice of which only the selected value is evaluated."""
        self.walk(condition)
        for value, true in ((yes, True), (no, False)):
            if value is not None:
                with self._where(condition, true):
                    self.walk(value)

    def _walk_both(self, node: Any, condition: Any, yes: Any, no: Any) -> WalkResult:
        """Walk a choice that computes both values; make it a branch where one must not be computed."""
        found, made = len(self.outside), len(self.branching)
        for value in (condition, yes, no):
            self.walk(value)
        if len(self.outside) > found:
            del self.outside[found:], self.branching[made:]
            self.branching.append(node)
            self._walk_selected(condition, yes, no)
        return WalkResult.SKIP

    # Accesses

    def _access(self, buffer: Any, indices: Sequence[Any]) -> None:
        size = self._sizes.get(buffer)
        if size is None or len(indices) != 1:
            self.outside.append(f"{buffer.name} is used where its size is not known")
        elif not self._inside(indices[0], size[0]):
            self.outside.append(f"{buffer.name}[{indices[0]}] may lie outside of its {size[0]} elements")

    def _inside(self, index: Any, size: int) -> bool:
        first, reach = index, 0
        if isinstance(index, tirx.Ramp) and isinstance(index.stride, tirx.IntImm):
            first, reach = index.base, int(index.stride) * (_lanes(index) - 1)
        if _lanes(first) == 1:
            bound = self.analyzer.const_int_bound(first)
            if bound.min_value + min(reach, 0) >= 0 and bound.max_value + max(reach, 0) < size:
                return True
        rest, constant = _without_constant(first)
        key = (structural_hash(rest), reach, *(structural_hash(c) * 2 + so for c, so in self.guards))
        low, high = self._known.get(key, (-np.inf, np.inf))
        if low + constant >= 0 and high + constant < size:
            return True
        found = _Boxes(self, index).below(size)
        if found is not None:
            self._known[key] = max(low, found[0] - constant), min(high, found[1] - constant)
        return found is not None


class _Boxes:
    """The possible values of an index where guards hold, by boxes of the ranges of its variables.

    Expressions become slots, equal expressions one slot, and steps that compute a slot for all boxes at once
    from earlier slots. Guards come first: what one says about a slot holds in the later steps.
    """

    def __init__(self, kernel: _Kernel, index: Any) -> None:
        self._kernel = kernel
        self._count = 1
        # Sides of the boxes: slots of variables, of lanes, and of loaded values
        self._sides: dict[int, Bounds] = {}
        self._values: list[Bounds] = []
        self._slots: dict[Any, int] = {}
        self._steps: list[Callable[[], None]] = []
        self._let_in = np.ones(1, bool)
        for condition, so in kernel.guards:
            self._guard(condition, so)
        self._index = self._slot(index)

    def below(self, size: int) -> tuple[float, float] | None:
        """Return bounds of the index in 0 .. size - 1 wherever guards hold; None if it may lie outside."""
        least, most = np.inf, -np.inf
        with np.errstate(all="ignore"):
            while True:
                low, high = self._compute()
                outside = self._let_in & ((low < 0) | (high >= size))
                inside = self._let_in & ~outside
                if inside.any():
                    least, most = min(least, float(low[inside].min())), max(most, float(high[inside].max()))
                if not outside.any():
                    return least, most
                if not self._cut(outside) or self._count > _MOST_BOXES:
                    return None

    def _compute(self) -> Bounds:
        """Return the bounds of the index in each box; `_let_in` then says which boxes the guards let in."""
        self._let_in = np.ones(self._count, bool)
        for step in self._steps:
            step()
        low, high = self._values[self._index]
        return np.broadcast_to(low, (self._count,)), np.broadcast_to(high, (self._count,))

    def _cut(self, kept: npt.NDArray[np.bool_]) -> bool:
        """Halve the `kept` boxes, along the side that widens the index most.

        False where one has no such side.
        """
        self._sides = {slot: (low[kept], high[kept]) for slot, (low, high) in self._sides.items()}
        self._count = int(kept.sum())
        slots = list(self._sides)
        if not slots:
            return False
        lengths = np.stack([high - low for low, high in self._sides.values()])
        if (lengths.max(0) < 1).any():
            return False
        wide = np.zeros((len(slots), self._count))
        if len(slots) > 1:
            for n, slot in enumerate(slots):
                low, high = self._sides[slot]
                self._sides[slot] = (np.floor((low + high) / 2),) * 2
                least, most = self._compute()
                # A box that the guards exclude is settled, whatever they made of the bounds.
                wide[n] = np.where(self._let_in, np.minimum(least - most, 0), 0)
                self._sides[slot] = low, high
        wide[lengths < 1] = -np.inf
        first = np.lexsort((-lengths, -wide), axis=0)[0] if len(slots) > 1 else np.zeros(self._count, int)
        for n, slot in enumerate(slots):
            low, high = self._sides[slot]
            middle = np.floor((low + high) / 2)
            self._sides[slot] = (
                np.concatenate([low, np.where(first == n, middle + 1, low)]),
                np.concatenate([np.where(first == n, middle, high), high]),
            )
        self._count *= 2
        return True

    # Slots

    def _slot(self, expr: Any) -> int:
        """Return the slot of a number; the slot of a vector holds the bounds of all its lanes."""
        expr = self._kernel.meaning(expr)
        key: Any = structural_hash(expr)
        if any(load.source in self._kernel.stored for load in loads(expr)):
            return self._add_step(expr)  # Memory may change, so each occurrence is another number
        if key not in self._slots:
            self._slots[key] = self._add_step(expr)
        return self._slots[key]

    def _add_step(self, expr: Any) -> int:
        kind, of = type(expr), terms.type_of(expr)
        if kind is tirx.IntImm:
            number = np.array([float(int(expr.value))])
            return self._step(lambda: (number, number), of)
        if kind in _ARITHMETIC:
            a, b = self._slot(expr.a), self._slot(expr.b)
            arithmetic = _ARITHMETIC[kind]
            return self._step(lambda: arithmetic(*self._values[a], *self._values[b]), of)
        if kind is tirx.Ramp:
            a, b = self._slot(expr.base), self._slot(expr.stride)
            n = self._lane(of.lanes)
            return self._step(
                lambda: _add(*self._values[a], *_multiply(*self._values[b], *self._values[n])), of
            )
        if kind is tirx.Cast and terms.type_of(expr.value).integer:
            value = self._slot(expr.value)
            return self._step(lambda: self._values[value], of)
        if kind is tirx.Select or (kind is ir.Call and _name(expr) == "if_then_else"):
            call = kind is ir.Call
            condition, yes, no = expr.args if call else (expr.condition, expr.true_value, expr.false_value)
            return self._choice(condition, yes, no, of)
        if kind is ir.Var and expr in self._kernel.ranges:
            return self._variable(expr)
        # A loaded value, or one computed in another way: equal expressions are equal numbers.
        return self._side(*_range(of))

    def _value(self, low: float, high: float) -> int:
        self._values.append((np.array([low]), np.array([high])))
        return len(self._values) - 1

    def _step(self, compute: Callable[[], Bounds], of: terms.Type) -> int:
        """Return a slot computed from other slots.

        A value beyond the limits of its type wraps, and counts as unknown then.
        """
        slot = self._value(0, 0)
        least, most = _range(of)

        def step() -> None:
            low, high = compute()
            held = (low >= least) & (high <= most)
            self._values[slot] = (
                (low, high) if held.all() else (np.where(held, low, least), np.where(held, high, most))
            )

        self._steps.append(step)
        return slot

    def _side(self, low: float, high: float) -> int:
        """Return a slot that is a side of the boxes, with its limits."""
        slot = self._value(low, high)
        self._sides[slot] = self._values[slot]

        def step() -> None:
            self._values[slot] = self._sides[slot]

        self._steps.append(step)
        return slot

    def _lane(self, lanes: int) -> int:
        if _LANE not in self._slots:
            self._slots[_LANE] = self._side(0, lanes - 1)
        return self._slots[_LANE]

    def _variable(self, var: ir.Var) -> int:
        first, extent = self._kernel.ranges[var]
        if isinstance(first, int | tirx.IntImm) and isinstance(extent, tirx.IntImm):
            return self._side(int(first), int(first) + int(extent) - 1)
        known = self._kernel.analyzer.const_int_bound(var)
        slot = self._slots[structural_hash(var)] = self._side(known.min_value, known.max_value)
        self._guard(tirx.GE(var, first), True)
        self._guard(tirx.LT(var, first + extent), True)
        return slot

    def _choice(self, condition: Any, yes: Any, no: Any, of: terms.Type) -> int:
        a, b = self._slot(yes), self._slot(no)
        may, may_not = self._truth(condition, True), self._truth(condition, False)

        def compute() -> Bounds:
            (al, ah), (bl, bh) = self._values[a], self._values[b]
            one, other = may(), may_not()
            low = np.minimum(np.where(one, al, np.inf), np.where(other, bl, np.inf))
            return low, np.maximum(np.where(one, ah, -np.inf), np.where(other, bh, -np.inf))

        return self._step(compute, of)

    # Truth

    def _guard(self, condition: Any, so: bool) -> None:
        """Add a step that excludes boxes by a guard, and narrows the bounds in the others."""
        may = self._truth(condition, so)
        compared = type(condition) in _INVERSE and terms.type_of(condition.a).integer
        held = type(condition) if so else _INVERSE.get(type(condition))
        a, b = (self._slot(condition.a), self._slot(condition.b)) if compared else (0, 0)
        if held in (tirx.GT, tirx.GE):
            a, b = b, a
        apart = int(held in (tirx.LT, tirx.GT))

        def step() -> None:
            self._let_in = self._let_in & may()
            if compared and held is not tirx.NE:
                (al, ah), (bl, bh) = self._values[a], self._values[b]
                self._values[a], self._values[b] = (
                    (al, np.minimum(ah, bh - apart)),
                    (np.maximum(bl, al + apart), bh),
                )
                if held is tirx.EQ:
                    low, high = np.maximum(al, bl), np.minimum(ah, bh)
                    self._values[a] = self._values[b] = low, high

        self._steps.append(step)

    def _truth(self, condition: Any, so: bool) -> Callable[[], npt.NDArray[np.bool_]]:
        """Return a function that computes in which boxes a condition may equal `so`."""
        condition = self._kernel.meaning(condition)
        kind = type(condition)
        if kind in (tirx.And, tirx.Or):
            one, other = self._truth(condition.a, so), self._truth(condition.b, so)
            if (kind is tirx.And) == so:
                return lambda: one() & other()
            return lambda: one() | other()
        if kind is tirx.Not:
            return self._truth(condition.a, not so)
        if kind in _INVERSE and terms.type_of(condition.a).integer:
            a, b, compare = (
                self._slot(condition.a),
                self._slot(condition.b),
                _MAY[kind if so else _INVERSE[kind]],
            )
            return lambda: compare(*self._values[a], *self._values[b])
        return lambda: np.ones(1, bool)


# Arithmetic on the least and the greatest value of two operands.


def _add(al: Numbers, ah: Numbers, bl: Numbers, bh: Numbers) -> Bounds:
    return al + bl, ah + bh


def _multiply(al: Numbers, ah: Numbers, bl: Numbers, bh: Numbers) -> Bounds:
    ends = [np.where((a == 0) | (b == 0), 0.0, a * b) for a in (al, ah) for b in (bl, bh)]
    return np.minimum.reduce(ends), np.maximum.reduce(ends)


def _quotient(rounded: Callable[[Numbers], Numbers]) -> Arithmetic:
    def divide(al: Numbers, ah: Numbers, bl: Numbers, bh: Numbers) -> Bounds:
        reach = np.maximum(np.abs(al), np.abs(ah))
        ends = [rounded(a / b) for a in (al, ah) for b in (bl, bh)]
        positive = bl >= 1
        return (
            np.where(positive, np.minimum.reduce(ends), -reach),
            np.where(positive, np.maximum.reduce(ends), reach),
        )

    return divide


def _remainder(floors: bool) -> Arithmetic:
    """Return a remainder's bounds: never negative with `floors`, else with the dividend's sign."""

    def remain(al: Numbers, ah: Numbers, bl: Numbers, bh: Numbers) -> Bounds:
        turn = np.floor(al / bl) * bl
        whole = (bl == bh) & (turn == np.floor(ah / bl) * bl) & ((al >= 0) | floors)
        least = np.zeros(1) if floors else np.where(al >= 0, 0, np.maximum(1 - bh, al))
        most = np.where(al >= 0, np.minimum(ah, bh - 1), bh - 1 if floors else np.clip(ah, 0, bh - 1))
        positive, reach = bl >= 1, np.maximum(np.abs(bl), np.abs(bh))
        return (
            np.where(positive, np.where(whole, al - turn, least), -reach),
            np.where(positive, np.where(whole, ah - turn, most), reach),
        )

    return remain


def _mask(al: Numbers, ah: Numbers, bl: Numbers, bh: Numbers) -> Bounds:
    """Return the bounds of the bitwise and of two numbers."""
    low, high = _remainder(True)(al, ah, bl + 1, bh + 1)
    mask = (bl == bh) & (bl >= 0) & (np.log2(np.maximum(bl, 0) + 1) % 1 == 0)
    least = np.where((al >= 0) | (bl >= 0), 0, -np.inf)
    most = np.minimum(np.where(al >= 0, ah, np.inf), np.where(bl >= 0, bh, np.inf))
    return np.where(mask, low, least), np.where(mask, high, most)


_TRUNCATED, _FLOORED = _quotient(np.trunc), _quotient(np.floor)
_ARITHMETIC: dict[type, Arithmetic] = {
    tirx.Add: _add, tirx.Sub: lambda al, ah, bl, bh: (al - bh, ah - bl), tirx.Mul: _multiply,
    tirx.Div: _TRUNCATED, tirx.FloorDiv: _FLOORED,
    tirx.Mod: _remainder(False), tirx.FloorMod: _remainder(True),
    tirx.LShift: lambda al, ah, bl, bh: _multiply(al, ah, 2.0**bl, 2.0**bh),
    tirx.RShift: lambda al, ah, bl, bh: _FLOORED(al, ah, 2.0**bl, 2.0**bh),
    tirx.BitwiseAnd: _mask,
    tirx.Min: lambda al, ah, bl, bh: (np.minimum(al, bl), np.minimum(ah, bh)),
    tirx.Max: lambda al, ah, bl, bh: (np.maximum(al, bl), np.maximum(ah, bh)),
}  # fmt: skip
_MAY: dict[type, Callable[[Numbers, Numbers, Numbers, Numbers], npt.NDArray[np.bool_]]] = {
    tirx.LT: lambda al, ah, bl, bh: al < bh, tirx.LE: lambda al, ah, bl, bh: al <= bh,
    tirx.GT: lambda al, ah, bl, bh: ah > bl, tirx.GE: lambda al, ah, bl, bh: ah >= bl,
    tirx.EQ: lambda al, ah, bl, bh: (al <= bh) & (bl <= ah),
    tirx.NE: lambda al, ah, bl, bh: ~((al == ah) & (bl == bh) & (al == bl)),
}  # fmt: skip


def _by_lanes(choice: Any) -> Any:
    """Return a choice made separately for each lane, of which only the selected value is evaluated."""
    count = _lanes(choice)
    chosen = [structural_map(lane(choice, n), [(tirx.Select, _lazy)]) for n in range(count)]
    return chosen[0] if count == 1 else tirx.Shuffle(chosen, list(range(count)))


def _lazy(select: tirx.Select) -> Any:
    return tirx.if_then_else(select.condition, select.true_value, select.false_value)


def _without_constant(index: Any) -> tuple[Any, int]:
    """Return an index without the constant at its end, and that constant."""
    if isinstance(index, tirx.Add | tirx.Sub) and isinstance(index.b, tirx.IntImm):
        return index.a, int(index.b) if isinstance(index, tirx.Add) else -int(index.b)
    return index, 0


def _name(call: ir.Call) -> str:
    return str(getattr(call.op, "name", "")).rpartition(".")[2]


def _range(of: terms.Type) -> tuple[float, float]:
    return terms.limits(terms.vector(of, 1)) if of.integer else (-np.inf, np.inf)


def _lanes(expr: Any) -> int:
    return terms.type_of(expr).lanes
