"""NumPy functions a plan may call between launches, for operators that have no kernel.

Each is registered with the attributes it takes and a rule that gives the shapes and dtypes of its outputs, so
that a file can be checked before anything runs. Semantics are ONNX's: among equal elements the lower index
comes first, NaN sorts as the largest value, negative indices count from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidArgument
from .model import Attr

Array = NDArray[Any]
Attrs = Mapping[str, Attr]


@dataclass(frozen=True, slots=True)
class Signature:
    """dtype (NumPy's name) and shape of one input or output."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Function:
    inputs: int
    attrs: Mapping[str, type]
    check: Callable[[Sequence[Signature], Sequence[Signature], Attrs], str | None]  # what is wrong, or None
    run: Callable[[Sequence[Array], Sequence[Signature], Attrs], tuple[Array, ...]]


def check(
    function: str, inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Mapping[str, Attr]
) -> None:
    """Raise InvalidArgument unless `function` exists and takes and gives just these."""
    known = _FUNCTIONS.get(function)
    if known is None:
        raise InvalidArgument(
            f"host function {function!r} does not exist; use one of {', '.join(_FUNCTIONS)}"
        )
    if len(inputs) != known.inputs:
        raise InvalidArgument(f"host function {function} takes {known.inputs} inputs, not {len(inputs)}")
    if attrs.keys() != known.attrs.keys():
        raise InvalidArgument(
            f"host function {function} takes the attributes {', '.join(known.attrs)}, "
            f"not {', '.join(attrs) or 'none'}"
        )
    for name, kind in known.attrs.items():
        if type(attrs[name]) is not kind:
            raise InvalidArgument(
                f"attribute {name} of host function {function} must be of type {kind.__name__}"
            )
    problem = known.check(inputs, outputs, attrs)
    if problem is not None:
        raise InvalidArgument(f"host function {function}: {problem}")


def run(
    function: str, inputs: Sequence[Array], outputs: Sequence[Signature], attrs: Attrs
) -> tuple[Array, ...]:
    """The outputs of `function`, of the dtypes and shapes in `outputs`; `check` must have passed.

    Raises InvalidArgument where an index among the inputs points outside the data.
    """
    results = _FUNCTIONS[function].run(inputs, outputs, attrs)
    return tuple(
        result.astype(wanted.dtype, copy=False).reshape(wanted.shape)
        for result, wanted in zip(results, outputs, strict=True)
    )


_INDEX_DTYPES = ("int32", "int64")
_REDUCTIONS: Mapping[str, Any] = {
    "add": np.add,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def _axis_problem(signature: Signature, attrs: Attrs) -> str | None:
    axis, rank = attrs["axis"], len(signature.shape)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        return f"axis {axis} is outside the {rank} dimensions of its input"
    return None


def _same(outputs: Sequence[Signature], expected: Sequence[Signature]) -> str | None:
    if list(outputs) != list(expected):
        return f"its outputs are {_shown(outputs)} instead of {_shown(expected)}"
    return None


def _shown(signatures: Sequence[Signature]) -> str:
    return ", ".join(f"{s.dtype}{list(s.shape)}" for s in signatures) or "none"


def _check_sort(inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Attrs) -> str | None:
    return _axis_problem(inputs[0], attrs) or _same(outputs, inputs)


def _check_argsort(inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Attrs) -> str | None:
    index = outputs[0].dtype if outputs and outputs[0].dtype in _INDEX_DTYPES else "int64"
    return _axis_problem(inputs[0], attrs) or _same(outputs, [Signature(index, inputs[0].shape)])


def _check_topk(inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Attrs) -> str | None:
    problem = _axis_problem(inputs[0], attrs)
    if problem is not None:
        return problem
    axis, k = _integer(attrs, "axis"), _integer(attrs, "k")
    shape = list(inputs[0].shape)
    if not 0 <= k <= shape[axis]:
        return f"k is {k} and its axis has {shape[axis]} elements"
    shape[axis] = k
    index = outputs[1].dtype if len(outputs) == 2 and outputs[1].dtype in _INDEX_DTYPES else "int64"
    return _same(outputs, [Signature(inputs[0].dtype, tuple(shape)), Signature(index, tuple(shape))])


def _check_scan(inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Attrs) -> str | None:
    problem = _axis_problem(inputs[0], attrs)
    if problem is not None:
        return problem
    if len(outputs) != 1 or outputs[0].shape != inputs[0].shape:
        return f"its outputs are {_shown(outputs)} instead of one of shape {list(inputs[0].shape)}"
    return None


def _check_gather_nd(inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Attrs) -> str | None:
    data, indices = inputs
    problem = _index_problem(data, indices, _integer(attrs, "batch_dims"))
    if problem is not None:
        return problem
    batch = _integer(attrs, "batch_dims")
    shape = indices.shape[:-1] + data.shape[batch + indices.shape[-1] :]
    return _same(outputs, [Signature(data.dtype, shape)])


def _check_scatter_nd(inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Attrs) -> str | None:
    data, indices, updates = inputs
    problem = _index_problem(data, indices, 0) or _reduction_problem(attrs)
    if problem is not None:
        return problem
    wanted = Signature(data.dtype, indices.shape[:-1] + data.shape[indices.shape[-1] :])
    if updates != wanted:
        return f"its updates are {_shown([updates])} instead of {_shown([wanted])}"
    return _same(outputs, [data])


def _check_scatter_elements(
    inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Attrs
) -> str | None:
    data, indices, updates = inputs
    problem = _axis_problem(data, attrs) or _reduction_problem(attrs)
    if problem is not None:
        return problem
    fits = len(indices.shape) == len(data.shape) and all(
        i <= d for i, d in zip(indices.shape, data.shape, strict=True)
    )
    if indices.dtype not in _INDEX_DTYPES or not fits:
        return f"its indices {_shown([indices])} do not fit its data {_shown([data])}"
    if updates != Signature(data.dtype, indices.shape):
        return (
            f"its updates are {_shown([updates])} instead of {_shown([Signature(data.dtype, indices.shape)])}"
        )
    return _same(outputs, [data])


def _index_problem(data: Signature, indices: Signature, batch: int) -> str | None:
    if indices.dtype not in _INDEX_DTYPES or not indices.shape:
        return f"its indices are {_shown([indices])} instead of int32 or int64 with a dimension at least"
    fits = 0 <= batch < len(indices.shape) and batch + indices.shape[-1] <= len(data.shape)
    if not fits or indices.shape[-1] == 0 or indices.shape[:batch] != data.shape[:batch]:
        return f"its indices {_shown([indices])} do not fit its data {_shown([data])}"
    return None


def _reduction_problem(attrs: Attrs) -> str | None:
    if attrs["reduction"] != "none" and attrs["reduction"] not in _REDUCTIONS:
        return f"reduction {attrs['reduction']!r} is not none, {', '.join(_REDUCTIONS)}"
    return None


def _integer(attrs: Attrs, name: str) -> int:
    value = attrs[name]
    if not isinstance(value, int):
        raise InvalidArgument(f"attribute {name} must be an integer")
    return value


def _order(values: Array, axis: int, descending: object) -> Array:
    """Stable sorting order: lower index first among equal elements, in both directions."""
    if not descending:
        return np.argsort(values, axis=axis, kind="stable")
    flipped = np.argsort(np.flip(values, axis), axis=axis, kind="stable")
    return np.flip(values.shape[axis] - 1 - flipped, axis)


def _sort(inputs: Sequence[Array], _: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    axis = _integer(attrs, "axis")
    ascending = np.sort(inputs[0], axis=axis, kind="stable")
    return (np.flip(ascending, axis) if attrs["descending"] else ascending,)


def _argsort(inputs: Sequence[Array], _: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    return (_order(inputs[0], _integer(attrs, "axis"), attrs["descending"]),)


def _topk(inputs: Sequence[Array], _: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
    axis, k = _integer(attrs, "axis"), _integer(attrs, "k")
    order = np.take(_order(inputs[0], axis, attrs["largest"]), range(k), axis=axis)
    if not attrs["sorted"]:
        order = np.sort(order, axis=axis)
    return np.take_along_axis(inputs[0], order, axis), order


def _scan(
    function: Any, neutral: int
) -> Callable[[Sequence[Array], Sequence[Signature], Attrs], tuple[Array, ...]]:
    def run_scan(inputs: Sequence[Array], outputs: Sequence[Signature], attrs: Attrs) -> tuple[Array, ...]:
        axis = _integer(attrs, "axis")
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
    batch, depth = _integer(attrs, "batch_dims"), indices.shape[-1]
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
    axis = _integer(attrs, "axis") % data.ndim
    at: list[Array] = list(np.indices(indices.shape, sparse=True))
    at[axis] = _checked_indices(indices, data.shape[axis])
    return _scatter(data, tuple(at), updates, attrs["reduction"])


_SCAN_ATTRS: Mapping[str, type] = {"axis": int, "exclusive": bool, "reverse": bool}
_FUNCTIONS: Mapping[str, _Function] = {
    "sort": _Function(1, {"axis": int, "descending": bool}, _check_sort, _sort),
    "argsort": _Function(1, {"axis": int, "descending": bool}, _check_argsort, _argsort),
    "topk": _Function(1, {"axis": int, "k": int, "largest": bool, "sorted": bool}, _check_topk, _topk),
    "cumsum": _Function(1, _SCAN_ATTRS, _check_scan, _scan(np.add, 0)),
    "cumprod": _Function(1, _SCAN_ATTRS, _check_scan, _scan(np.multiply, 1)),
    "gather_nd": _Function(2, {"batch_dims": int}, _check_gather_nd, _gather_nd),
    "scatter_nd": _Function(3, {"reduction": str}, _check_scatter_nd, _scatter_nd),
    "scatter_elements": _Function(
        3, {"axis": int, "reduction": str}, _check_scatter_elements, _scatter_elements
    ),
}
