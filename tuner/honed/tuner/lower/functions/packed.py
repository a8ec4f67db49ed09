"""Products with packed constants in blocks that share a scale: each block is summed, and its sum scaled once.

Numbers of few bits are not converted. Where they lie they are the last bits of the significand of a float
that 2^23 (of halves 2^10) is then taken from, exactly, and their place is made up for by the other operand,
or they are shifted first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import ir, relax, te, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from honed.protocol.dataclass import dataclass

from .views import PRODUCT, bindings, extents, is_call, is_fixed

_WORD = 32  # bits, as models are normalised
_PACKED_AXES = 4  # blocks, words of a block, numbers of a word, columns


@dataclass(frozen=True, slots=True)
class _Float:
    """A type's word of equal width, the bits of its significand, and 2 to the power of these as a word."""

    word: str
    significand: int
    power: int


_FLOATS: Mapping[str, _Float] = {
    "float32": _Float("uint32", 23, 0x4B000000),
    "float16": _Float("uint16", 10, 0x6400),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """The second operand of a product: (words' numbers - zeros) * scales, in blocks along the sum."""

    words: ir.GenericConst  # [blocks, words of a block, 1, columns]
    bits: int
    zeros: ir.GenericConst  # one, or [blocks, 1, 1, columns]
    scales: ir.GenericConst  # [blocks, 1, 1, columns]


def multiply_packed(module: IRModule) -> IRModule:
    """Return a Relax module whose products with packed constants are one operator each."""
    main = module.get_global_var("main")
    mutated = _Products(module)
    mutated.builder_.update_func(main, mutated.visit_expr(module[main]))
    return relax.transform.DeadCodeElimination()(mutated.builder_.get()) if mutated.found else module


@mutator
class _Products(PyExprMutator):  # type: ignore[misc]  # TVM's base has no types
    def __init__(self, module: IRModule) -> None:
        super().__init__(module)
        self.found = False
        self._made = {one.var: one.value for one in bindings(module["main"])}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Return the expression that replaces a call."""
        packed = self._packed(call)
        new = self.visit_expr_post_order(call)
        if packed is None:
            return new
        self.found = True
        kind = str(call.ty.dtype)
        zeros = packed.zeros.value.numpy()
        return self.builder_.call_te(
            lambda x, words, scales, *more: _product(
                x, words, scales, more[0] if more else zeros.item(), packed.bits, kind
            ),
            new.args[0],
            relax.const(_in_words(packed.words.value.numpy(), _FLOATS[kind].word)),
            packed.scales,
            *([packed.zeros] if zeros.size > 1 else []),
            primfunc_name_hint="matmul_packed",
            primfunc_attrs=dict(PRODUCT),
        )

    def _packed(self, call: relax.Call) -> _Packed | None:
        """Return the packed constants that a call multiplies by; None where it is another call."""
        if (
            not is_call(call, "relax.matmul")
            or str(call.ty.dtype) not in _FLOATS
            or not all(map(is_fixed, call.args))
        ):
            return None
        scaled, scales, *_ = self._given(self._first(call.args[1], "reshape"), "multiply")
        moved, zeros, *_ = self._given(scaled, "subtract")
        masked = self._first(self._first(moved, "astype"), "bitwise_and")
        words, shifts, *_ = self._given(masked, "right_shift")
        constants = (words, shifts, self._first(zeros, "astype") or zeros, scales)
        found = [one for one in constants if isinstance(one, ir.GenericConst)]
        if len(found) < len(constants):
            return None
        words, shifts, zeros, scales = found
        if len(extents(words)) != _PACKED_AXES or str(words.ty.dtype) != _FLOATS["float32"].word:
            return None
        return _Packed(words=words, bits=_WORD // shifts.value.numpy().size, zeros=zeros, scales=scales)

    def _given(self, expr: relax.Expr | None, name: str) -> tuple[relax.Expr | None, ...]:
        """Return what the operator that makes a value is given; Nones where it is another operator."""
        made = self._made.get(expr)
        return tuple(made.args) if made is not None and is_call(made, f"relax.{name}") else (None, None)

    def _first(self, expr: relax.Expr | None, name: str) -> relax.Expr | None:
        return self._given(expr, name)[0]


def _in_words(words: npt.NDArray[np.uint32], kind: str) -> npt.NDArray[Any]:
    """Return words [blocks, words, 1, columns] cut into words of a type, the lowest bits first."""
    width = 8 * np.dtype(kind).itemsize
    parts = [(words >> low).astype(kind) for low in range(0, _WORD, width)]
    return np.concatenate(parts, axis=2).reshape(words.shape[0], -1, 1, words.shape[-1])


def _product(
    x: te.Tensor, words: te.Tensor, scales: te.Tensor, zeros: te.Tensor | float, bits: int, kind: str
) -> te.Tensor:
    """Return x [..., terms] times what is packed, [..., columns]."""
    blocks, of_block, _, columns = (int(extent) for extent in words.shape)
    outer, as_float = list(x.shape[:-1]), _FLOATS[kind]
    each = 8 * np.dtype(as_float.word).itemsize // bits
    # Only one row of singles: several would be divided each, and halves have not the range for it.
    in_place = kind == "float32" and math.prod(map(int, outer)) == 1
    beside, terms = as_float.significand // bits if in_place else 1, of_block * each
    term, block = te.reduce_axis((0, terms), "k"), te.reduce_axis((0, blocks), "b")

    def at_block(given: te.Tensor | float, b: tirx.PrimExpr, column: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.const(given, kind) if isinstance(given, float) else given(b, 0, 0, column).astype(kind)

    def of_block_(*at: tirx.Var) -> tirx.PrimExpr:
        *rows, b, column = at
        number = term % each
        place = number % beside * bits  # of its lowest bit in the significand
        word = words(b, term // each, 0, column) >> (number // beside * (beside * bits)).astype(as_float.word)
        mask = tirx.const((1 << bits) - 1, as_float.word) << place.astype(as_float.word)
        raw = tirx.reinterpret(kind, (word & mask) | tirx.const(as_float.power, as_float.word))
        times = (tirx.const(1, "int32") << place.astype("int32")).astype(kind)
        low = at_block(zeros, b, column) * times + tirx.const(float(1 << as_float.significand), kind)
        smaller = x(*rows, b * terms + term).astype(kind) * (tirx.const(1, kind) / times)
        return te.sum(smaller * (raw - low), axis=term)

    sums = te.compute([*outer, blocks, columns], of_block_, name="block_sums")

    def whole(*at: tirx.Var) -> tirx.PrimExpr:
        *rows, column = at
        return te.sum(sums(*rows, block, column) * at_block(scales, block, column), axis=block)

    return te.compute([*outer, columns], whole, name="matmul")
