"""Requests run as one, joined along the first dimension of every tensor; and whether a model allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import HonedError, InvalidArgument
from honed.runtime.dtypes import STRING, dtype

Array = NDArray[Any]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]
_ROWS = (1, 2, 1)  # of the requests that are compared
# Sums in other orders: as far off as an answer in float32 may be (`honed.tuner.prove.tolerance`).
_ALLOWED = 1e-3
_ALLOWED_HALF = 2e-2
_SEED = 20


def run(model: Run, given: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """The outputs for each of the inputs; raises InvalidArgument where they cannot be run as one."""
    rows = [next(iter(inputs.values())).shape[0] for inputs in given]
    if len(given) == 1:
        return [model(given[0])]
    together = {name: np.concatenate([inputs[name] for inputs in given]) for name in given[0]}
    computed = model(together)
    for name, value in computed.items():
        if not value.ndim or value.shape[0] != sum(rows):
            raise InvalidArgument(
                f"output {name!r} has shape {list(value.shape)} for {sum(rows)} rows of inputs"
            )
    ends = np.cumsum(rows)
    return [
        {name: np.ascontiguousarray(value[end - count : end]) for name, value in computed.items()}
        for count, end in zip(rows, ends, strict=True)
    ]


def objection(model: Run, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """Why rows of a model depend on each other, as requests of several rows show; "" where they do not.

    `shapes` are those of one row, with NumPy's names of types.
    """
    rng = np.random.default_rng(_SEED)
    sets = [
        {name: _made((rows, *shape[1:]), kind, rng) for name, (shape, kind) in shapes.items()}
        for rows in _ROWS
    ]
    try:
        apart = [model(inputs) for inputs in sets]
        together = run(model, sets)
    except HonedError as error:
        return f"it cannot be run on several requests at once ({error})"
    for one, other in zip(apart, together, strict=True):
        for name, expected in one.items():
            found = other[name]
            if expected.shape != found.shape:
                return f"output {name!r} has another shape beside others: {list(found.shape)}"
            if not _close(expected, found):
                return f"output {name!r} is another when a request is run beside others"
    return ""


def zeros(shape: tuple[int, ...], kind: str) -> Array:
    """An input of zeros, or of empty strings."""
    if kind == STRING.name:
        return np.full(shape, "", object)
    return np.zeros(shape, dtype(kind).numpy)


def _made(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> Array:
    """Normal values; of integers 0 and 1, which most indices may be."""
    if kind == STRING.name:
        return np.array([f"text {n}" for n in rng.integers(0, 9, int(np.prod(shape)))], object).reshape(shape)
    made: Array = zeros(shape, kind)
    if made.dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(made.dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(made.dtype)


def _close(expected: Array, found: Array) -> bool:
    if expected.dtype.kind in "iubO":
        return bool(np.array_equal(expected, found))
    allowed = _ALLOWED if expected.dtype.itemsize > 2 else _ALLOWED_HALF
    left, right = expected.astype(np.float64), found.astype(np.float64)
    largest = float(np.max(np.abs(left), initial=0.0, where=np.isfinite(left)))
    return bool(np.allclose(left, right, rtol=0.0, atol=allowed * (largest or 1.0), equal_nan=True))
