"""Lets products and sums with them read values in place, by strides, and lets products write transposes.

This saves copies that are transposed, sliced or repeated. NumPy's strides show how a value is a view of
another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax, te, tirx, topi
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from honed.tuner.lower.statements import is_call

# The kind of a function for TVM's fusion (relax.analysis.OpPatternKind), which TVM gets wrong for views.
_KIND = "honed.pattern"
_ELEMENTWISE, INJECTIVE, PRODUCT, _OPAQUE = {_KIND: 0}, {_KIND: 2}, {_KIND: 4}, {_KIND: 8}

Shape = tuple[int, ...]
_FEW_ROWS = 8  # Rows up to which copying the second operand takes longer than reading it column by column
Lookup = Callable[[relax.Var], relax.Expr | None]
_Bytes = npt.NDArray[np.int8]


def bindings(function: relax.Function) -> list[relax.Binding]:
    """Return all bindings of a function, in order."""
    return [binding for block in function.body.blocks for binding in block.bindings]


def variables(expr: relax.Expr) -> list[relax.Var]:
    """Return the variables that an expression reads."""
    found: list[relax.Var] = []
    relax.analysis.post_order_visit(expr, lambda e: found.append(e) if isinstance(e, relax.Var) else None)
    return found


def readers(function: relax.Function) -> Counter[relax.Var]:
    """Return how often each variable of a function is read."""
    read = [*(binding.value for binding in bindings(function)), function.body.body]
    return Counter(var for one in read for var in variables(one))


@dataclass(frozen=True, slots=True)
class StridedIndex:
    """The index along one dimension: `start`, plus or minus (`sign`) the view's index along `axis`.

    `sign` 0: constant. Each `times` neighbours along the axis share an index.
    """

    axis: int
    sign: int
    start: int
    times: int = 1

    def at(self, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return the index of the dimension for an element of the view."""
        if not self.sign:
            return tirx.IntImm("int64", self.start)
        along = indices[self.axis] if self.times == 1 else indices[self.axis] // self.times
        return self.start - along if self.sign < 0 else along + self.start if self.start else along


@dataclass(frozen=True, slots=True)
class StridedView:
    """A view of `source` in the shape `dimensions`: an index for each of them."""

    source: relax.Expr
    dimensions: Shape
    indices: tuple[StridedIndex, ...]
    shape: Shape

    @property
    def moves(self) -> bool:
        """Return whether the view is more than the source with another shape."""
        axes = [index.axis for index in self.indices if index.sign]
        whole = math.prod(self.shape) == math.prod(self.dimensions)
        return not whole or axes != sorted(axes) or any(index.sign < 0 for index in self.indices)

    @property
    def contiguous_axis(self) -> int | None:
        """The axis along which neighbours are neighbours in memory; None where there is none."""
        last = self.indices[-1] if self.indices else None
        return last.axis if last is not None and last.sign == last.times == 1 else None

    def has_rows_along(self, axes: Container[int]) -> bool:
        """Return whether rows along one of the axes are whole rows of the last dimension."""
        return self.contiguous_axis in axes and self.indices[-1].start == 0

    def at(self, indices: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """Return the place of an element in the source."""
        return [index.at(indices) for index in self.indices]


def view(expr: relax.Expr, lookup: Lookup) -> StridedView | None:
    """Return an expression as a view of the earliest value it moves; None where it has no elements."""
    return next(views(expr, lookup), None)


def views(expr: relax.Expr, lookup: Lookup) -> Iterator[StridedView]:
    """Yield an expression as views of the values it moves, earliest first; none if it has no elements."""
    steps: list[_Step] = []
    sources = [expr]
    while (step := _moving(sources[-1], lookup)) is not None:
        steps.append(step)
        sources.append(step.source)
    while sources:
        memory: _Bytes = np.empty(extents(sources[-1]), np.int8)
        seen, times = _apply_steps(memory, steps[len(sources) - 2 :: -1] if len(sources) > 1 else ())
        if seen is not None and not seen.size:
            return
        found = None if seen is None else _view(sources[-1], memory, seen)
        if found is not None:
            yield _repeat(found, times)
        sources.pop()


def whole(expr: relax.Expr) -> StridedView:
    """Return a view that shows a value unchanged."""
    shape = extents(expr)
    indices = [StridedIndex(axis, int(extent > 1), 0) for axis, extent in enumerate(shape)]
    return StridedView(expr, shape, tuple(indices), shape)


def extents(expr: relax.Expr) -> Shape:
    """Return the shape of a value, which must be fixed."""
    return tuple(int(extent) for extent in expr.ty.shape)


def is_fixed(expr: relax.Expr) -> bool:
    """Return whether a value is a tensor whose shape is known."""
    shape = getattr(expr.ty, "shape", None)
    return shape is not None and all(isinstance(extent, tirx.IntImm) for extent in shape)


@dataclass(frozen=True, slots=True)
class _Step:
    """A call that only moves the elements of `source`, or repeats each place along an axis `times` times."""

    call: relax.Call
    source: relax.Expr
    axis: int = 0
    times: int = 1


def _moving(expr: relax.Expr, lookup: Lookup) -> _Step | None:
    """Return how an expression is made, if that only moves the elements of another; else None."""
    made = lookup(expr) if isinstance(expr, relax.Var) else expr
    if not isinstance(made, relax.Call) or getattr(made.op, "name", "") not in _MOVES:
        return None
    return _repeating(made, lookup) or (_Step(made, made.args[0]) if is_fixed(made.args[0]) else None)


def _repeating(call: relax.Call, lookup: Lookup) -> _Step | None:
    """Return how a Reshape repeats places, as exporters write heads that share keys; None where it does not.

    A new axis is added after another, broadcast, and merged with it.
    """
    broadcast: Any = lookup(call.args[0]) if isinstance(call.args[0], relax.Var) else None
    if not (is_call(call, "relax.reshape") and is_call(broadcast, "relax.broadcast_to")):
        return None
    added: Any = lookup(broadcast.args[0]) if isinstance(broadcast.args[0], relax.Var) else None
    if not is_call(added, "relax.reshape") or not all(map(is_fixed, (added.args[0], added, broadcast, call))):
        return None
    before, one, many = extents(added.args[0]), extents(added), extents(broadcast)
    axis = next((n for n, (a, b) in enumerate(zip(one, many, strict=False)) if a != b), 0)
    outer, inner = before[: axis - 1], before[axis:]
    if not axis or len(one) != len(many) or one != (*before[:axis], 1, *inner):
        return None
    times = many[axis]
    repeated = (*outer, before[axis - 1] * times, *inner)
    if many != (*before[:axis], times, *inner) or extents(call) != repeated:
        return None
    return _Step(call, added.args[0], axis - 1, times)


def _apply_steps(memory: _Bytes, steps: Sequence[_Step]) -> tuple[_Bytes | None, list[int]]:
    """Return memory as seen after the steps, and the repetitions of each place along its axes.

    None where that takes a copy.
    """
    seen, times = memory, [1] * memory.ndim
    for step in steps:
        if step.times > 1:
            times[step.axis] *= step.times
            continue
        transposes = is_call(step.call, "relax.permute_dims")
        moves = transposes or max(times, default=1) == 1
        moved = _MOVES[step.call.op.name](seen, step.call) if moves else None
        if moved is None:
            return None, times
        times = [times[axis] for axis in _axes(step.call)] if transposes else [1] * moved.ndim
        seen = moved
    return seen, times


def _repeat(view: StridedView, times: Sequence[int]) -> StridedView:
    """Return a view that repeats each place along an axis `times` times."""
    indices = tuple(replace(one, times=times[one.axis]) if one.sign else one for one in view.indices)
    shape = tuple(extent * n for extent, n in zip(view.shape, times, strict=True))
    return replace(view, indices=indices, shape=shape)


def _axes(transpose: relax.Call) -> list[int]:
    """Return the axes of a transpose's operand in their new order."""
    return [int(axis) for axis in transpose.attrs.axes or reversed(range(len(extents(transpose))))]


def _transpose(seen: _Bytes, call: relax.Call) -> _Bytes:
    return seen.transpose(_axes(call))


def _reshape(seen: _Bytes, call: relax.Call) -> _Bytes | None:
    found = seen.view()
    try:
        found.shape = extents(call)
    except AttributeError:
        return None  # Strides alone cannot express it
    return found


def _slice(seen: _Bytes, call: relax.Call) -> _Bytes:
    axes, begins, _, *strides = ([int(n.value) for n in one.fields] for one in call.args[1:])
    found, wanted = seen, extents(call)
    for place, (axis, begin) in enumerate(zip(axes, begins, strict=True)):
        step, have = strides[0][place] if strides else 1, seen.shape[axis]
        start = min(max(begin + have if begin < 0 else begin, 0), have - 1)
        end = start + step * wanted[axis]
        found = found[(slice(None),) * axis + (slice(start, end if end >= 0 else None, step),)]
    return found


def cut_at(call: relax.Call) -> int | None:
    """Return how many elements precede a slice's; None if it has none, or they are not adjacent."""
    memory: _Bytes = np.empty(extents(call.args[0]), np.int8)
    seen = _slice(memory, call)
    return _address(seen) - _address(memory) if seen.size and seen.flags.c_contiguous else None


_MOVES: Mapping[str, Callable[[_Bytes, relax.Call], _Bytes | None]] = {
    "relax.permute_dims": _transpose,
    "relax.reshape": _reshape,
    "relax.strided_slice": _slice,
}


def _view(source: relax.Expr, memory: _Bytes, seen: _Bytes) -> StridedView | None:
    """Return a view by the dimensions that strides divide the source into, and the index along each.

    Return None where the strides do not divide the source.
    """
    offset = _address(seen) - _address(memory)
    axes = [axis for axis, extent in enumerate(seen.shape) if extent > 1]
    found: list[tuple[int, StridedIndex]] = []
    left = memory.size
    for axis in sorted(axes, key=lambda axis: -abs(seen.strides[axis])):
        stride, extent = seen.strides[axis], seen.shape[axis]
        size, start = left // abs(stride), offset // abs(stride)
        first, last = sorted((start, start + (extent - 1 if stride > 0 else 1 - extent)))
        if left % abs(stride) or first < 0 or last >= size:
            return None
        left, offset = abs(stride), offset % abs(stride)
        if stride > 0 and start % extent == 0 and size % extent == 0:
            found += [
                (size // extent, StridedIndex(0, 0, start // extent)),
                (extent, StridedIndex(axis, 1, 0)),
            ]
        else:
            found.append((size, StridedIndex(axis, 1 if stride > 0 else -1, start)))
    found.append((left, StridedIndex(0, 0, offset)))
    kept = [(size, index) for size, index in found if size > 1]
    return StridedView(source, tuple(size for size, _ in kept), tuple(index for _, index in kept), seen.shape)


def _address(array: _Bytes) -> int:
    interface: dict[str, Any] = array.__array_interface__
    return int(interface["data"][0])


def read_by_strides(module: IRModule) -> tuple[IRModule, dict[relax.Var, relax.Var]]:
    """Return a Relax module whose products read views where their operands are moved values.

    Also return, by the variables of the transposes that products now write, the variables of those products,
    which no longer exist.
    """
    main = module.get_global_var("main")
    mutated = _Views(module)
    mutated.builder_.update_func(main, mutated.visit_expr(module[main]))
    return relax.transform.DeadCodeElimination()(mutated.builder_.get()), mutated.written


def annotate_views(module: IRModule) -> IRModule:
    """Return the module with views annotated for fusion by their own kind.

    Call this after TVM has annotated all functions.
    """
    for name, func in module.functions.items():
        if isinstance(func, tirx.PrimFunc) and _KIND in func.attrs:
            module[name] = func.with_attr("op_pattern", func.attrs[_KIND]).without_attr(_KIND)
    return module


@mutator
class _Views(PyExprMutator):  # type: ignore[misc]  # TVM's base has no types
    def __init__(self, module: IRModule) -> None:
        super().__init__(module)
        self.products: dict[relax.Var, relax.Call] = {}
        self.readers = readers(module["main"])
        self.written: dict[relax.Var, relax.Var] = {}  # Products by the transposes that they write
        self.variables: dict[relax.Call, relax.Var] = {}
        for binding in bindings(module["main"]):
            if isinstance(binding.value, relax.Call):
                self.variables[binding.value] = binding.var
            if _is_product(binding.value):
                self.products[binding.var] = binding.value

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Return a cheaper replacement for a call of the module, or the call itself where there is none."""
        new = self.visit_expr_post_order(call)
        made: relax.Expr | None = None
        if call.args and call.args[0] in self.products and is_call(call, "relax.permute_dims"):
            made = self.transpose(call)
        elif is_call(call, "relax.add"):
            made = self.add(call)
        elif _is_product(call):
            made = self.multiply(call)
        return new if made is None else made

    def multiply(self, call: relax.Call) -> relax.Expr | None:
        """Return a product of views in place of a product of moved values; None where no operand is moved."""
        operands = self.operands(call)
        if not any(one.moves for one in operands):
            return None
        return self.product(operands, call, list(range(len(extents(call)))))

    def transpose(self, call: relax.Call) -> relax.Expr | None:
        """Return a product that writes its transpose; None where others read it or rows do not stay rows."""
        rank = len(extents(call))
        axes = _axes(call)
        if self.readers[call.args[0]] > 1 or axes[-1] != rank - 1:
            return None
        made = self.products[call.args[0]]
        self.written[self.variables[call]] = call.args[0]
        return self.product(self.operands(made), made, axes)

    def add(self, call: relax.Call) -> relax.Expr | None:
        """Return a view added to a product that nothing else reads, so that both can be fused; else None."""
        for made, other in (call.args, reversed(call.args)):
            if made not in self.products or self.readers[made] > 1 or not is_fixed(other):
                continue
            if extents(made) != extents(other):
                continue
            one = view(self.visit_expr(other), self.lookup_binding)
            if one is not None and one.moves and one.contiguous_axis == len(one.shape) - 1:
                return self.sum(self.visit_expr(made), one)
        return None

    def operands(self, call: relax.Call) -> list[StridedView]:
        """Return the operands of a product as views whose elements lie as its sums need them.

        The second operand is read along its rows, as a copy would be: otherwise vectors of columns would be
        gathered, and no pair of halves would be adjacent. The first operand is read along rows or columns,
        because each step of the sum needs several rows; and so is the second, where these are few. Both are
        views of one value where that is possible.
        """
        first, second = (self.visit_expr(expr) for expr in call.args)
        rank, last = len(extents(first)), len(extents(second)) - 1
        few = rank > 1 and extents(first)[-2] <= _FEW_ROWS
        right = next(self.views_along(second, {last - few, last}), whole(second))
        lefts = list(self.views_along(first, {rank - 2, rank - 1}))
        shared = [one for one in lefts if one.source.same_as(right.source)]
        return [next(iter((*shared, *lefts)), whole(first)), right]

    def views_along(self, expr: relax.Expr, axes: Container[int]) -> Iterator[StridedView]:
        """Yield the views of an operand with whole rows along one of the axes, the earliest value first."""
        return (one for one in views(expr, self.lookup_binding) if one.moves and one.has_rows_along(axes))

    def product(self, operands: Sequence[StridedView], call: relax.Call, axes: Sequence[int]) -> relax.Expr:
        """Return the product of two views, with its axes in the given order."""
        shape, dtype = extents(call), str(call.ty.dtype)

        def product(first: te.Tensor, second: te.Tensor) -> te.Tensor:
            return _permute(_product((first, second), operands, shape, dtype), axes)

        given = [self.source_of(one) for one in operands]
        return self.builder_.call_te(
            product, *given, primfunc_name_hint="matmul", primfunc_attrs=dict(PRODUCT)
        )

    def sum(self, dot: relax.Expr, one: StridedView) -> relax.Expr:
        """Return the sum of a product and a view."""

        def add(product: te.Tensor, other: te.Tensor) -> te.Tensor:
            return te.compute(product.shape, lambda *i: product(*i) + other(*one.at(i)), name="add")

        return self.builder_.call_te(
            add, dot, self.source_of(one), primfunc_name_hint="add", primfunc_attrs=dict(_ELEMENTWISE)
        )

    def source_of(self, one: StridedView) -> relax.Expr:
        """Return the source of a view, reshaped to the dimensions it is indexed by; nothing fuses with it.

        Two views of one value need two operands: with a single operand, everything between two places would
        be copied.
        """
        if not one.moves:
            return one.source
        reshape = self.builder_.call_te(
            topi.reshape, one.source, one.dimensions, primfunc_name_hint="seen", primfunc_attrs=dict(_OPAQUE)
        )
        return self.builder_.emit(reshape)


def _is_product(expr: relax.Expr) -> bool:
    """Return whether an expression is a product of matrices, or stacks of them, of known shapes."""
    if not is_call(expr, "relax.matmul") or not all(is_fixed(one) for one in (expr, *expr.args)):
        return False
    return min(len(extents(one)) for one in expr.args) > 1


def _product(
    tensors: Sequence[te.Tensor], views: Sequence[StridedView], shape: Shape, dtype: str
) -> te.Tensor:
    """Return the matrix product of two views, computed in one block."""
    k = te.reduce_axis((0, views[0].shape[-1]), name="k")

    def value(*indices: tirx.Var) -> tirx.PrimExpr:
        ends = ((indices[-2], k.var), (k.var, indices[-1]))
        read = [
            tensor(*one.at([*indices[len(shape) - len(one.shape) : -2], *end])).astype(dtype)
            for tensor, one, end in zip(tensors, views, ends, strict=True)
        ]
        return te.sum(read[0] * read[1], axis=k)

    return te.compute(shape, value, name="matmul")


def _permute(tensor: te.Tensor, axes: Sequence[int]) -> te.Tensor:
    """Return a tensor with its axes reordered in a separate block, or itself if the order is kept."""
    if list(axes) == sorted(axes):
        return tensor
    shape = [tensor.shape[axis] for axis in axes]
    return te.compute(
        shape, lambda *i: tensor(*(i[axes.index(n)] for n in range(len(axes)))), name="transpose"
    )
