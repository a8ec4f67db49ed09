"""NumPy functions a plan may call between launches, for operators that have no kernel.

`hostrules` says what each takes and gives, so that a file can be checked before anything runs.
Semantics are ONNX's: among equal elements the lower index comes first, NaN sorts as the largest value,
negative indices count from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument
from honed.runtime.compiled.hostrules import Attrs, Signature, integer
from honed.runtime.compiled.model import Attr

Array = NDArray[Any]
Run = Callable[[Sequence[Array], Sequence[Signature], Attrs], tuple[Array, ...]]


def run(
    function: str, inputs: Sequence[Array], outputs: Sequence[Signature], attrs: Attrs
) -> tuple[Array, ...]:
    """The outputs of `function`, of the dtypes and shapes in `outputs`; `hostrules.check` must have passed.

    Raises InvalidArgument where an index among the inputs points outside the data.
    """
    results = _FUNCTIONS[function](inputs, outputs, attrs)
    return tuple(
        result.astype(wanted.dtype, copy=False).reshape(wanted.shape)
        for result, wanted in zip(results, outputs, strict=True)
    )


_REDUCTIONS: Mapping[str, Any] = {
    "add": np.add,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def _order(values: Array, axis: int, descending: object) -> Array:
    """Stable sorting order: lower index first among equal elements, in both directions."""
    if not descending:
        return np.argsort(values, axis=axis, kind="stable")
    flipped = np.argsort(np.flip(values, axis), axis=axis, kind="stable")
    return np.flip(values.shape[axis] - 1 - flipped, axis)


def _sort(inputs: Sequence[Array], _: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    axis = integer(attrs, "axis")
    ascending = np.sort(inputs[0], axis=axis, kind="stable")
    return (np.flip(ascending, axis) if attrs["descending"] else ascending,)


def _argsort(inputs: Sequence[Array], _: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    return (_order(inputs[0], integer(attrs, "axis"), attrs["descending"]),)


def _topk(inputs: Sequence[Array], _: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    axis, k = integer(attrs, "axis"), integer(attrs, "k")
    order = np.take(_order(inputs[0], axis, attrs["largest"]), range(k), axis=axis)
    if not attrs["sorted"]:
        order = np.sort(order, axis=axis)
    return np.take_along_axis(inputs[0], order, axis), order


def _scan(function: Any, neutral: int) -> Run:
    def run_scan(inputs: Sequence[Array], outputs: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
        axis = integer(attrs, "axis")
        # float16 loses a sum of a few thousand terms; it is rounded once, at the end.
        kind = "float32" if outputs[0].dtype == "float16" else outputs[0].dtype
        values = np.flip(inputs[0], axis) if attrs["reverse"] else inputs[0]
        result = function.accumulate(values, axis=axis, dtype=kind)
        if attrs["exclusive"]:
            result = np.roll(result, 1, axis)
            first = [slice(None)] * result.ndim
            first[axis] = slice(0, 1)
            result[tuple(first)] = neutral
        return (np.flip(result, axis) if attrs["reverse"] else result,)

    return run_scan


def _checked_indices(indices: Array, sizes: Array | int) -> Array:
    """`indices` counted from the start; raises InvalidArgument where one is outside."""
    if np.any(indices < -np.asarray(sizes)) or np.any(indices >= sizes):
        raise InvalidArgument("an index among the inputs points outside the data; check the indices you pass")
    return np.where(indices < 0, indices + sizes, indices)


def _gather_nd(inputs: Sequence[Array], outputs: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    data, indices = inputs
    batch, depth = integer(attrs, "batch_dims"), indices.shape[-1]
    count = int(np.prod(data.shape[:batch], dtype=np.int64))
    inner = data.shape[batch:]
    where = _checked_indices(indices, np.asarray(inner[:depth], np.int64))
    if 0 in outputs[0].shape:
        return (np.empty(outputs[0].shape, data.dtype),)
    where = where.reshape(count, -1, depth)
    rows = np.arange(count)[:, None]
    return (data.reshape(count, *inner)[(rows, *np.moveaxis(where, -1, 0))],)


def _scatter(data: Array, at: tuple[Array, ...], updates: Array, reduction: Attr) -> tuple[Array, ...]:
    result = np.array(data)
    if reduction == "none":
        result[at] = updates
    else:
        _REDUCTIONS[str(reduction)].at(result, at, updates)
    return (result,)


def _scatter_nd(inputs: Sequence[Array], _: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    data, indices, updates = inputs
    where = _checked_indices(indices, np.asarray(data.shape[: indices.shape[-1]], np.int64))
    return _scatter(data, tuple(np.moveaxis(where, -1, 0)), updates, attrs["reduction"])


def _scatter_elements(inputs: Sequence[Array], _: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    data, indices, updates = inputs
    axis = integer(attrs, "axis") % data.ndim
    at: list[Array] = list(np.indices(indices.shape, sparse=True))
    at[axis] = _checked_indices(indices, data.shape[axis])
    return _scatter(data, tuple(at), updates, attrs["reduction"])


_FUNCTIONS: Mapping[str, Run] = {
    "sort": _sort,
    "argsort": _argsort,
    "topk": _topk,
    "cumsum": _scan(np.add, 0),
    "cumprod": _scan(np.multiply, 1),
    "gather_nd": _gather_nd,
    "scatter_nd": _scatter_nd,
    "scatter_elements": _scatter_elements,
}
