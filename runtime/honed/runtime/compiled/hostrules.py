"""What the functions of `hostcalls` take and give: the attributes of each, and a rule for shapes and dtypes.

No NumPy is needed here: the service checks files with this and never runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from honed.protocol.errors import InvalidArgument

from .model import Attr

Attrs = Mapping[str, Attr]
REDUCTIONS = ("add", "mul", "min", "max")
_INDEX_DTYPES = ("int32", "int64")


@dataclass(frozen=True, slots=True)
class Signature:
    """dtype (NumPy's name) and shape of one input or output."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Rule:
    inputs: int
    attrs: Mapping[str, type]
    check: Callable[[Sequence[Signature], Sequence[Signature], Attrs], str | None]  # what is wrong, or None


def check(
    function: str, inputs: Sequence[Signature], outputs: Sequence[Signature], attrs: Mapping[str, Attr]
) -> None:
    """Raise InvalidArgument unless `function` exists and takes and gives just these."""
    known = _RULES.get(function)
    if known is None:
        raise InvalidArgument(f"host function {function!r} does not exist; use one of {', '.join(_RULES)}")
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


def integer(attrs: Attrs, name: str) -> int:
    """The attribute `name`, which `check` knows to be an integer."""
    value = attrs[name]
    if not isinstance(value, int):
        raise InvalidArgument(f"attribute {name} must be an integer")
    return value


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
    axis, k = integer(attrs, "axis"), integer(attrs, "k")
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
    problem = _index_problem(data, indices, integer(attrs, "batch_dims"))
    if problem is not None:
        return problem
    batch = integer(attrs, "batch_dims")
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
    if attrs["reduction"] != "none" and attrs["reduction"] not in REDUCTIONS:
        return f"reduction {attrs['reduction']!r} is not none, {', '.join(REDUCTIONS)}"
    return None


_SCAN_ATTRS: Mapping[str, type] = {"axis": int, "exclusive": bool, "reverse": bool}
_RULES: Mapping[str, _Rule] = {
    "sort": _Rule(1, {"axis": int, "descending": bool}, _check_sort),
    "argsort": _Rule(1, {"axis": int, "descending": bool}, _check_argsort),
    "topk": _Rule(1, {"axis": int, "k": int, "largest": bool, "sorted": bool}, _check_topk),
    "cumsum": _Rule(1, _SCAN_ATTRS, _check_scan),
    "cumprod": _Rule(1, _SCAN_ATTRS, _check_scan),
    "gather_nd": _Rule(2, {"batch_dims": int}, _check_gather_nd),
    "scatter_nd": _Rule(3, {"reduction": str}, _check_scatter_nd),
    "scatter_elements": _Rule(3, {"axis": int, "reduction": str}, _check_scatter_elements),
}
