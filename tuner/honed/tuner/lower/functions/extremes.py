"""Largest and smallest elements along axes and in windows, and their places, where some are not finite.

TVM starts them from the lowest finite number, and places from -1: an extreme of nothing but -inf becomes
-3.4e38, and its place lies outside of the tensor. Here they start from infinities and from place 0. Softmax
keeps TVM's start, which gives equal results for whole rows; where a part of a row is all -inf, its
exponentials would be NaN if they started from -inf.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, relax, te, tirx, topi

Legalise = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]
_VALUES = ("relax.max", "relax.min", "relax.nn.max_pool1d", "relax.nn.max_pool2d", "relax.nn.max_pool3d")


def rules() -> dict[str, Legalise]:
    """Return the legalisation of each of these Relax operators, by the operator's name."""
    return {
        **{name: _rule(ir.Op.get(name).get_attr("FLegalize")) for name in _VALUES},
        "relax.argmax": lambda builder, call: _place(builder, call, largest=True),
        "relax.argmin": lambda builder, call: _place(builder, call, largest=False),
    }


def register() -> None:
    """Have TVM split these reductions over work-items, as it does those that start from finite numbers."""
    for extreme, largest in ((tirx.max, True), (tirx.min, False)):
        _register(1, lambda a, b, of=extreme: [of(a[0], b[0])], _start(largest=largest))
        _register(2, _better(largest=largest), _start(largest=largest))


def _register(count: int, combine: Callable[..., Any], start: Callable[..., Any]) -> None:
    """Register a reduction in TVM's table, which lives until the process ends.

    The table is freed after the interpreter, when it must not call Python: so the functions are never freed.
    """
    functions = [tvm_ffi.convert(function) for function in (combine, start)]
    for function in functions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")(count, *functions)


def _start(*, largest: bool) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that gives a reduction's initial values: of values, or of places and values.

    The place comes first.
    """

    def start(values: Sequence[Any]) -> list[Any]:
        types = [str(value.ty.dtype) for value in values]
        return [*(tirx.const(0, of) for of in types[:-1]), _worst(types[-1], largest=largest)]

    return start


def _worst(dtype: str, *, largest: bool) -> Any:
    if "float" in dtype:
        return tirx.FloatImm(dtype, -math.inf if largest else math.inf)
    return (tirx.min_value if largest else tirx.max_value)(dtype)


def _better(*, largest: bool) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """Return a function that picks the better of two (place, value) pairs.

    Of equal values it picks the first place. NaN is never better.
    """

    def better(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        (at, value), (other, found) = a, b
        beats = found > value if largest else found < value
        as_good = found >= value if largest else found <= value  # First, because usually it is not
        first = tirx.all(as_good, tirx.any(beats, other < at))
        return [tirx.Select(first, other, at), tirx.Select(beats, found, value)]

    return better


def _place(builder: relax.BlockBuilder, call: relax.Call, *, largest: bool) -> relax.Expr:
    """Return the place of an extreme along one axis, as the importer writes it."""
    axis, keep = int(call.attrs.axis) % len(call.args[0].ty.shape), bool(call.attrs.keepdims)
    reduced = te.comm_reducer(
        lambda a, b: _better(largest=largest)(a, b),
        lambda place, of: (tirx.const(0, place), _worst(of, largest=largest)),
        name="place",
    )

    def place(x: te.Tensor) -> te.Tensor:
        along = te.reduce_axis((0, x.shape[axis]), name="along")
        left = [extent for n, extent in enumerate(x.shape) if n != axis]

        def find_place(*indices: Any) -> Any:
            at = [*indices[:axis], along, *indices[axis:]]
            return reduced((along.var.astype("int64"), x(*at)), axis=along)

        places, _ = te.compute(left, find_place, name="place")
        shape = [*left[:axis], 1, *left[axis:]] if keep else left

        def take_place(*indices: Any) -> Any:
            return places(*(indices[:axis] + indices[axis + 1 :] if keep else indices))

        return te.compute(shape, take_place, name="place_of", tag=topi.tag.COMM_REDUCE_IDX)

    return builder.call_te(place, call.args[0], primfunc_name_hint="argmax" if largest else "argmin")


def _rule(plain: Legalise) -> Legalise:
    """Return TVM's legalisation, with infinities in place of the lowest or highest finite number."""

    def rule(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        made = plain(builder, call)
        if not isinstance(made, relax.Call) or "float" not in str(call.ty.dtype):
            return made
        name = made.args[0]
        func = builder.get()[name]
        builder.update_func(name, func.with_body(tvm_ffi.structural_map(func.body, [(tirx.FloatImm, _open)])))
        return made

    return rule


def _open(number: tirx.FloatImm) -> tirx.FloatImm:
    dtype, value = str(number.ty.dtype), float(number.value)
    end = float(tirx.max_value(dtype).value)
    return tirx.FloatImm(dtype, math.copysign(math.inf, value)) if abs(value) == end else number
