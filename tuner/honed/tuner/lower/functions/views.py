"""Products and what is added to them read values where they lie, by strides, and products write transposes.

Instead of copies that were transposed or sliced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence

from tvm import relax, te, tirx, topi
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from .strided import Shape, StridedView, extents, is_fixed, view, views, whole
from .tracing import bindings

# What a function is to TVM's fusion (relax.analysis.OpPatternKind), which tells it wrongly of views.
_KIND = "honed.pattern"
_ELEMENTWISE, INJECTIVE, PRODUCT, _OPAQUE = {_KIND: 0}, {_KIND: 2}, {_KIND: 4}, {_KIND: 8}


def read_by_strides(module: IRModule) -> tuple[IRModule, dict[relax.Var, relax.Var]]:
    """A Relax module whose products are of views, where their operands are moved values.

    Besides, by the variables of transposes that products write, those of the products, which are gone.
    """
    main = module.get_global_var("main")
    mutated = _Views(module)
    mutated.builder_.update_func(main, mutated.visit_expr(module[main]))
    return relax.transform.DeadCodeElimination()(mutated.builder_.get()), mutated.written


def annotate_views(module: IRModule) -> IRModule:
    """The module with views annotated for fusion as what they are; for after TVM has annotated all."""
    for name, func in module.functions.items():
        if isinstance(func, tirx.PrimFunc) and _KIND in func.attrs:
            module[name] = func.with_attr("op_pattern", func.attrs[_KIND]).without_attr(_KIND)
    return module


@mutator
class _Views(PyExprMutator):  # type: ignore[misc]  # TVM's base has no types
    def __init__(self, module: IRModule) -> None:
        super().__init__(module)
        self.products: dict[relax.Var, relax.Call] = {}
        self.readers: Counter[relax.Var] = Counter()
        self.written: dict[relax.Var, relax.Var] = {}  # products by the transposes that they write
        self.variables: dict[relax.Call, relax.Var] = {}
        main = module["main"]
        for binding in bindings(main):
            if isinstance(binding.value, relax.Call):
                self.variables[binding.value] = binding.var
            if _is_product(binding.value):
                self.products[binding.var] = binding.value
            relax.analysis.post_order_visit(binding.value, self._count)
        relax.analysis.post_order_visit(main.body.body, self._count)

    def _count(self, expr: relax.Expr) -> None:
        if isinstance(expr, relax.Var):
            self.readers[expr] += 1

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """What takes the place of a call of the module, where something pays; else the call."""
        new = self.visit_expr_post_order(call)
        made: relax.Expr | None = None
        if call.args and call.args[0] in self.products and _is(call, "relax.permute_dims"):
            made = self.transposed(call)
        elif _is(call, "relax.add"):
            made = self.added(call)
        elif _is_product(call):
            made = self.multiplied(call)
        return new if made is None else made

    def multiplied(self, call: relax.Call) -> relax.Expr | None:
        """A product of views in the place of one of moved values."""
        operands = self.operands(call)
        if not any(one.moves for one in operands):
            return None
        return self.product(operands, call, list(range(len(extents(call)))))

    def transposed(self, call: relax.Call) -> relax.Expr | None:
        """A product that writes its transpose, where nothing else reads it and rows stay rows."""
        rank = len(extents(call))
        axes = [int(axis) for axis in call.attrs.axes or reversed(range(rank))]
        if self.readers[call.args[0]] > 1 or axes[-1] != rank - 1:
            return None
        made = self.products[call.args[0]]
        self.written[self.variables[call]] = call.args[0]
        return self.product(self.operands(made), made, axes)

    def added(self, call: relax.Call) -> relax.Expr | None:
        """A view added to a product that nothing else reads, to be fused with it."""
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
        """What the operands of a product are views of, where elements lie as its sums need them.

        Those of the second are read along its rows, which a copy would have, too: vectors of columns would be
        gathered, and no pair of halves lies together. Those of the first are read along rows or columns, as
        several rows are needed of each step of the sum; where both can be views of one value, they are.
        """
        first, second = (self.visit_expr(expr) for expr in call.args)
        rank, last = len(extents(first)), len(extents(second)) - 1
        right = next(self.seen_along(second, {last}), whole(second))
        lefts = list(self.seen_along(first, {rank - 2, rank - 1}))
        shared = [one for one in lefts if one.source.same_as(right.source)]
        return [next(iter((*shared, *lefts)), whole(first)), right]

    def seen_along(self, expr: relax.Expr, axes: Container[int]) -> Iterator[StridedView]:
        """The views that an operand is of which whole rows lie along one of the axes, the furthest first."""
        return (one for one in views(expr, self.lookup_binding) if one.moves and one.has_rows_along(axes))

    def product(self, operands: Sequence[StridedView], call: relax.Call, axes: Sequence[int]) -> relax.Expr:
        """The product of two views with its axes in the order given."""
        shape, dtype = extents(call), str(call.ty.dtype)

        def product(first: te.Tensor, second: te.Tensor) -> te.Tensor:
            return _permuted(_product((first, second), operands, shape, dtype), axes)

        given = [self.seen_as(one) for one in operands]
        return self.builder_.call_te(
            product, *given, primfunc_name_hint="matmul", primfunc_attrs=dict(PRODUCT)
        )

    def sum(self, made: relax.Expr, one: StridedView) -> relax.Expr:
        """The sum of a product and a view."""

        def added(product: te.Tensor, other: te.Tensor) -> te.Tensor:
            return te.compute(product.shape, lambda *i: product(*i) + other(*one.at(i)), name="add")

        return self.builder_.call_te(
            added, made, self.seen_as(one), primfunc_name_hint="add", primfunc_attrs=dict(_ELEMENTWISE)
        )

    def seen_as(self, one: StridedView) -> relax.Expr:
        """The source of a view with the dimensions that it is indexed by, which nothing is fused with.

        Two views of one value are two operands: of what is one operand, all between two places is copied.
        """
        if not one.moves:
            return one.source
        reshape = self.builder_.call_te(
            topi.reshape, one.source, one.dimensions, primfunc_name_hint="seen", primfunc_attrs=dict(_OPAQUE)
        )
        return self.builder_.emit(reshape)


def _is(expr: relax.Expr, name: str) -> bool:
    return isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == name


def _is_product(expr: relax.Expr) -> bool:
    """Whether an expression is a product of matrices, or stacks of them, of known shapes."""
    if not _is(expr, "relax.matmul") or not all(is_fixed(one) for one in (expr, *expr.args)):
        return False
    return min(len(extents(one)) for one in expr.args) > 1


def _product(
    tensors: Sequence[te.Tensor], views: Sequence[StridedView], shape: Shape, dtype: str
) -> te.Tensor:
    """The matrix product of two views in one block."""
    k = te.reduce_axis((0, views[0].shape[-1]), name="k")

    def value(*indices: tirx.Var) -> tirx.PrimExpr:
        ends = ((indices[-2], k.var), (k.var, indices[-1]))
        read = [
            tensor(*one.at([*indices[len(shape) - len(one.shape) : -2], *end])).astype(dtype)
            for tensor, one, end in zip(tensors, views, ends, strict=True)
        ]
        return te.sum(read[0] * read[1], axis=k)

    return te.compute(shape, value, name="matmul")


def _permuted(tensor: te.Tensor, axes: Sequence[int]) -> te.Tensor:
    """A tensor with its axes in another order, in a block of its own; itself where the order is the same."""
    if list(axes) == sorted(axes):
        return tensor
    shape = [tensor.shape[axis] for axis in axes]
    return te.compute(
        shape, lambda *i: tensor(*(i[axes.index(n)] for n in range(len(axes)))), name="transpose"
    )
