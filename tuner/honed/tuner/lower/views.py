"""Products read operands where they lie, by strides, instead of transposed or sliced copies of them."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from .strided import Shape, View, extents, view, whole


def read_by_strides(module: IRModule) -> IRModule:
    """A Relax module whose products are of views, where their operands are moved values."""
    products = _Products(module)
    main = module.get_global_var("main")
    products.builder_.update_func(main, products.visit_expr(module[main]))
    return relax.transform.DeadCodeElimination()(products.builder_.get())


@mutator
class _Products(PyExprMutator):  # type: ignore[misc]  # TVM's base has no types
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """A product of views in the place of a product of moved values; any other call as it is."""
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.matmul" or min(len(extents(a)) for a in call.args) < 2:
            return call
        operands = [self.operand(expr) for expr in call.args]
        if not any(one.moves for one in operands):
            return call
        given = [self.seen_as(one) for one in operands]
        shape, dtype = extents(call), str(call.ty.dtype)

        def product(first: te.Tensor, second: te.Tensor) -> te.Tensor:
            return _product((first, second), operands, shape, dtype)

        return self.builder_.call_te(product, *given, primfunc_name_hint="matmul")

    def operand(self, expr: relax.Expr) -> View:
        """What an operand is a view of, where its rows lie in memory as a copy's would; else the operand.

        Vectors of columns would be gathered, and no pair of halves lies together.
        """
        found = view(expr, self.lookup_binding)
        if found is None or not found.moves or found.contiguous_axis != len(found.shape) - 1:
            return whole(expr)
        return found

    def seen_as(self, one: View) -> relax.Expr:
        """The source of a view with the dimensions that it is indexed by.

        Two views of one value are two operands: of what is one operand, all between two places is copied.
        """
        return self.builder_.emit(relax.op.reshape(one.source, one.dimensions)) if one.moves else one.source


def _product(tensors: Sequence[te.Tensor], views: Sequence[View], shape: Shape, dtype: str) -> te.Tensor:
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
