"""Multiplies by packed constants in blocks that share a scale: sums each block, and scales its sum once.

Numbers of few bits are not converted. In place they are bits of the significand of a float, from which 2^23
(for halves 2^10) is then subtracted, exactly. Their position is compensated by a factor of the other operand,
or for halves, whose range is too small for that, of the float itself. Other numbers are shifted first,
several at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import ir, relax, te, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from honed.machine.profile import DeviceProfile
from honed.tuner.lower.statements import is_call

from .views import PRODUCT, bindings, extents, is_fixed

_WORD = 32  # Bits, as models are normalised
_MOST_ZERO = 255  # Largest zero point that is added exactly to a float of 2^10 and more
# Products of as many rows unpack their constants once for all rows on a large GPU: each of its many groups
# would unpack them again, which took twice as long for prompts on an H200.
_MANY_ROWS = 64
_PACKED_AXES = 4  # Blocks, words of a block, numbers of a word, columns


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

    words: ir.GenericConst  # Shape [blocks, words of a block, 1, columns]
    bits: int
    zeros: ir.GenericConst  # A single element, or [blocks, 1, 1, columns]
    scales: ir.GenericConst  # Shape [blocks, 1, 1, columns]


def multiply_packed(module: IRModule, profile: DeviceProfile) -> IRModule:
    """Return a Relax module whose products with packed constants are one operator each.

    Those of `_MANY_ROWS` rows on a large GPU stay as they are, with a kernel that unpacks the constants.
    """
    main = module.get_global_var("main")
    mutated = _Products(module, _MANY_ROWS if profile.is_large_gpu else None)
    mutated.builder_.update_func(main, mutated.visit_expr(module[main]))
    return relax.transform.DeadCodeElimination()(mutated.builder_.get()) if mutated.found else module


@mutator
class _Products(PyExprMutator):  # type: ignore[misc]  # TVM's base has no types
    def __init__(self, module: IRModule, rows: int | None) -> None:
        """Initialise; leave out products of at least `rows` rows, with None no product."""
        super().__init__(module)
        self.found = False
        self._rows = rows
        self._made = {one.var: one.value for one in bindings(module["main"])}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Return the expression that replaces a call."""
        packed = self._match(call)
        new = self.visit_expr_post_order(call)
        if packed is None:
            return new
        self.found = True
        kind = str(call.ty.dtype)
        zeros = packed.zeros.value.numpy()
        whole = bool(np.isin(zeros, np.arange(_MOST_ZERO + 1)).all())
        return self.builder_.call_te(
            lambda x, words, scales, *more: _product(
                x, words, scales, more[0] if more else float(zeros.item()), packed.bits, kind, whole=whole
            ),
            new.args[0],
            relax.const(_in_words(packed.words.value.numpy(), _FLOATS[kind].word)),
            packed.scales,
            *([packed.zeros] if zeros.size > 1 else []),
            primfunc_name_hint="matmul_packed",
            primfunc_attrs=dict(PRODUCT),
        )

    def _match(self, call: relax.Call) -> _Packed | None:
        """Return the packed constants that a call multiplies by; None for another call."""
        if (
            not is_call(call, "relax.matmul")
            or str(call.ty.dtype) not in _FLOATS
            or not all(map(is_fixed, call.args))
            or (self._rows is not None and math.prod(extents(call)[:-1]) >= self._rows)
        ):
            return None
        scaled, scales, *_ = self._operands_of(self._first(call.args[1], "reshape"), "multiply")
        moved, zeros, *_ = self._operands_of(scaled, "subtract")
        masked = self._first(self._first(moved, "astype"), "bitwise_and")
        words, shifts, *_ = self._operands_of(masked, "right_shift")
        constants = (words, shifts, self._first(zeros, "astype") or zeros, scales)
        found = [one for one in constants if isinstance(one, ir.GenericConst)]
        if len(found) < len(constants):
            return None
        words, shifts, zeros, scales = found
        if len(extents(words)) != _PACKED_AXES or str(words.ty.dtype) != _FLOATS["float32"].word:
            return None
        return _Packed(words=words, bits=_WORD // shifts.value.numpy().size, zeros=zeros, scales=scales)

    def _operands_of(self, expr: relax.Expr | None, name: str) -> tuple[relax.Expr | None, ...]:
        """Return the operands of the operator that makes a value; Nones where it is another operator."""
        made = self._made.get(expr)
        return tuple(made.args) if made is not None and is_call(made, f"relax.{name}") else (None, None)

    def _first(self, expr: relax.Expr | None, name: str) -> relax.Expr | None:
        return self._operands_of(expr, name)[0]


def _in_words(words: npt.NDArray[np.uint32], kind: str) -> npt.NDArray[Any]:
    """Return words [blocks, words, 1, columns] cut into words of a type, the lowest bits first."""
    width = 8 * np.dtype(kind).itemsize
    parts = [(words >> low).astype(kind) for low in range(0, _WORD, width)]
    return np.concatenate(parts, axis=2).reshape(words.shape[0], -1, 1, words.shape[-1])


def _product(
    x: te.Tensor,
    words: te.Tensor,
    scales: te.Tensor,
    zeros: te.Tensor | float,
    bits: int,
    kind: str,
    *,
    whole: bool,
) -> te.Tensor:
    """Return x [..., terms] times the packed constants, [..., columns]; zeros may be `whole` numbers."""
    blocks, of_block, _, columns = (int(extent) for extent in words.shape)
    outer, as_float = list(x.shape[:-1]), _FLOATS[kind]
    each, halves = 8 * np.dtype(as_float.word).itemsize // bits, kind == "float16"
    # Numbers of a word used in place: of singles more than one only for one row, as each row scales `x`
    # again.
    beside = as_float.significand // bits if halves or math.prod(map(int, outer)) == 1 else 1
    terms = of_block * each
    term, block = te.reduce_axis((0, terms), "k"), te.reduce_axis((0, blocks), "b")

    def at_block(scale: te.Tensor | float, b: tirx.PrimExpr, column: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.const(scale, kind) if isinstance(scale, float) else scale(b, 0, 0, column).astype(kind)

    def of_block_(*at: tirx.Var) -> tirx.PrimExpr:
        *rows, b, column = at
        number = term % each

        def at_place(value: Callable[[int], float], dtype: str) -> tirx.PrimExpr:
            """Return the constant that `value` gives for the number's lowest bit in the significand."""
            found = tirx.const(value(0), dtype)
            for n in range(1, beside):
                found = tirx.Select(number % beside == n, tirx.const(value(n * bits), dtype), found)
            return found

        word = words(b, term // each, 0, column) >> (number // beside * (beside * bits)).astype(as_float.word)
        kept = word & at_place(lambda low: (1 << bits) - 1 << low, as_float.word)
        # Added, not combined: a Mali adds at four times the rate, and other compilers combine them anyway.
        raw = tirx.reinterpret(kind, kept + tirx.const(as_float.power, as_float.word))
        given, zero = x(*rows, b * terms + term).astype(kind), at_block(zeros, b, column)
        smaller = at_place(lambda low: 0.5**low, kind)
        if halves:
            raw = raw * smaller
            power = at_place(lambda low: 2.0 ** (as_float.significand - low), kind)
        else:
            given, zero = given * smaller, zero * at_place(lambda low: 2.0**low, kind)
            power = tirx.const(2.0**as_float.significand, kind)
        return te.sum(given * (raw - (zero + power) if whole else raw - power - zero), axis=term)

    sums = te.compute([*outer, blocks, columns], of_block_, name="block_sums")

    def sum_blocks(*at: tirx.Var) -> tirx.PrimExpr:
        *rows, column = at
        return te.sum(sums(*rows, block, column) * at_block(scales, block, column), axis=block)

    return te.compute([*outer, columns], sum_blocks, name="matmul")
