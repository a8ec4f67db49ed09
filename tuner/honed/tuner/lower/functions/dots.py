"""Products and convolutions of signed bytes: dot products of four at a time, where a device has them.

Four bytes along a sum lie in one word, so that an instruction multiplies and adds four pairs
(cl_khr_integer_dot_product). Elsewhere bytes are widened first, constants while compiling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import ir, relax, te, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from honed.machine.profile import DeviceProfile
from honed.tuner.lower import DOT

from .views import INJECTIVE, PRODUCT, bindings, extents, is_fixed

_PRODUCT, _CONVOLUTION = "relax.matmul", "relax.nn.conv2d"
_BYTES, _WORD = 4, "uint32"


def multiply_bytes(module: IRModule, profile: DeviceProfile) -> IRModule:
    """Return a Relax module without the byte products and convolutions that Relax would multiply singly."""
    main = module.get_global_var("main")
    if not any(_is_of_bytes(binding.value) for binding in bindings(module[main])):
        return module
    mutated = _Bytes(module, dots=profile.limits.int8_dots)
    mutated.builder_.update_func(main, mutated.visit_expr(module[main]))
    return relax.transform.DeadCodeElimination()(mutated.builder_.get())


@mutator
class _Bytes(PyExprMutator):  # type: ignore[misc]  # TVM's base has no types
    def __init__(self, module: IRModule, *, dots: bool) -> None:
        super().__init__(module)
        self.dots = dots
        # Words, by the bytes, the axis of the sum, and the padding.
        self.laid: dict[tuple[relax.Var, int, tuple[int, ...]], relax.Expr] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Return the expression that replaces a call."""
        new = self.visit_expr_post_order(call)
        if not _is_of_bytes(new):
            return new
        product = new.op.name == _PRODUCT
        if self.dots and product and min(len(extents(one)) for one in new.args) > 1:
            return self.product(new)
        if self.dots and not product and new.attrs.groups == 1:
            return self.convolution(new)
        return relax.Call(new.op, [self.widen(one) for one in new.args], new.attrs)

    def widen(self, bytes_: relax.Expr) -> relax.Expr:
        """Return the byte tensor converted to int32."""
        if isinstance(bytes_, ir.GenericConst):
            return relax.const(bytes_.value.numpy().astype(np.int32))
        return self.builder_.emit(relax.op.astype(bytes_, "int32"))

    def words(self, bytes_: relax.Expr, axis: int, pads: Sequence[int] = ()) -> relax.Expr:
        """Pack four bytes along an axis into each word; the last word is filled up with zeros.

        `pads` are zeros before and after the last two axes.
        """
        if isinstance(bytes_, ir.GenericConst):
            return relax.const(_pack(bytes_.value.numpy(), axis))
        key = (bytes_, axis, tuple(pads))
        if key not in self.laid:
            made = self.builder_.call_te(
                lambda x: _words(x, axis, pads),
                bytes_,
                primfunc_name_hint="words",
                primfunc_attrs=dict(INJECTIVE),
            )
            self.laid[key] = self.builder_.emit(made)
        return self.laid[key]

    def product(self, call: relax.Call) -> relax.Expr:
        """Return a product of matrices, or of stacks of matrices."""
        first, second = call.args
        ranks = [len(extents(one)) for one in call.args]
        shape = [int(extent) for extent in call.ty.shape]
        return self.builder_.call_te(
            lambda x, y: _product(x, y, shape),
            self.words(first, ranks[0] - 1),
            self.words(second, ranks[1] - 2),
            primfunc_name_hint="matmul_bytes",
            primfunc_attrs=dict(PRODUCT),
        )

    def convolution(self, call: relax.Call) -> relax.Expr:
        """Return a convolution of an already padded image, with weights laid out by output channels."""
        image, weights = call.args
        attrs = call.attrs
        shape = [int(extent) for extent in call.ty.shape]
        strides, dilation = ([int(n) for n in values] for values in (attrs.strides, attrs.dilation))
        words = self.words(weights, 1)
        return self.builder_.call_te(
            lambda x, w: _convolution(x, w, shape, strides, dilation),
            self.words(image, 1, [int(n) for n in attrs.padding]),
            words,
            primfunc_name_hint="conv2d_bytes",
            primfunc_attrs=dict(PRODUCT),
        )


def _is_of_bytes(expr: relax.Expr) -> bool:
    """Return whether an expression is a product or a convolution of signed bytes of known shapes."""
    if not isinstance(expr, relax.Call) or getattr(expr.op, "name", "") not in (_PRODUCT, _CONVOLUTION):
        return False
    return all(is_fixed(one) and str(one.ty.dtype) == "int8" for one in expr.args)


def _pack(bytes_: np.ndarray, axis: int) -> np.ndarray:
    """Return a constant in the layout that `_words` gives a tensor."""
    last = np.moveaxis(bytes_, axis, -1)
    filled = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % _BYTES)])
    words = np.ascontiguousarray(filled).view("<u4").astype(np.uint32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def _words(x: te.Tensor, axis: int, pads: Sequence[int]) -> te.Tensor:
    before = [0] * len(x.shape)
    shape = [int(extent) for extent in x.shape]
    given = list(shape)
    if pads:
        top, left, bottom, right = pads
        before[-2:] = top, left
        shape[-2:] = shape[-2] + top + bottom, shape[-1] + left + right
    shape[axis] = -(-shape[axis] // _BYTES)
    checked = [-2, -1] if any(pads) else []
    if given[axis] % _BYTES:
        checked.append(axis)

    def word(*at: tirx.Var) -> tirx.PrimExpr:
        found = None
        for n in range(_BYTES):
            place = [i - low for i, low in zip(at, before, strict=True)]
            place[axis] = at[axis] * _BYTES + n
            byte = x(*place)
            if checked:  # 0 where there is no element along these axes
                inside = [test for at_ in checked for test in (place[at_] >= 0, place[at_] < given[at_])]
                byte = tirx.if_then_else(tirx.all(*inside), byte, tirx.const(0, "int8"))
            part = (byte.astype(_WORD) & tirx.const(255, _WORD)) << tirx.const(8 * n, _WORD)
            found = part if found is None else found | part
        return found

    return te.compute(shape, word, name="words")


def _dot(a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.call_pure_extern("int32", DOT, a, b)


def _product(x: te.Tensor, y: te.Tensor, shape: Sequence[int]) -> te.Tensor:
    k = te.reduce_axis((0, int(x.shape[-1])), "k")

    def value(*at: tirx.Var) -> tirx.PrimExpr:
        *stack, row, column = at
        return te.sum(_dot(x(*_of(x, stack), row, k), y(*_of(y, stack), k, column)), axis=k)

    return te.compute(shape, value, name="matmul")


def _of(operand: te.Tensor, stack: Sequence[tirx.Var]) -> list[tirx.PrimExpr]:
    """Return the place of a broadcast operand in its own stack, for a place in the result's stack."""
    own = [int(extent) for extent in operand.shape[:-2]]
    last = stack[len(stack) - len(own) :]
    return [at if extent > 1 else tirx.const(0, "int64") for at, extent in zip(last, own, strict=True)]


def _convolution(
    x: te.Tensor, w: te.Tensor, shape: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> te.Tensor:
    extents_ = [int(extent) for extent in w.shape[1:]]
    c, ky, kx = (te.reduce_axis((0, size), name) for size, name in zip(extents_, "cyx", strict=True))

    def value(n: tirx.Var, o: tirx.Var, y: tirx.Var, across: tirx.Var) -> tirx.PrimExpr:
        at = y * strides[0] + ky * dilation[0], across * strides[1] + kx * dilation[1]
        return te.sum(_dot(x[n, c, at[0], at[1]], w[o, c, ky, kx]), axis=[c, ky, kx])

    return te.compute(shape, value, name="conv")
