"""Where the host's arrays meet the device's buffers: checks, casts and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument
from honed.runtime.compiled.model import CompiledModel
from honed.runtime.dtypes import dtype

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output: the dtype its user sees, the dtype its buffer holds."""

    name: str
    shape: tuple[int, ...]
    buffer: int
    seen: np.dtype[Any]
    held: np.dtype[Any]
    narrows: bool  # integers of `seen` may not fit `held`


def ports(model: CompiledModel, place: str) -> tuple[Port, ...]:
    """The ports of a model's inputs (`place` "input") or outputs ("output"), in order."""
    found = []
    for tensor in model.inputs if place == "input" else model.outputs:
        seen, held = dtype(tensor.dtype).numpy, dtype(model.buffers[tensor.buffer].dtype).numpy
        narrows = held.kind in "iu" and not np.can_cast(seen, held)
        found.append(Port(tensor.name, tensor.shape, tensor.buffer, seen, held, narrows))
    return tuple(found)


def checked(wanted: tuple[Port, ...], given: Mapping[str, Array]) -> list[Array]:
    """The arrays of `given` in the order of `wanted`, each of its port's `seen` dtype and shape.

    Raises InvalidArgument for missing and unknown names, other dtypes and shapes, and integers that the
    model cannot hold. NaN is a value like any other.
    """
    if given.keys() != {port.name for port in wanted}:
        raise InvalidArgument(_names_problem(wanted, given))
    return [_checked(port, given[port.name]) for port in wanted]


def store(port: Port, value: Array, target: Array) -> None:
    """Write `value` to `target`, an array of the port's `held` dtype and shape."""
    if port.seen.kind == "b":
        np.not_equal(value.view(np.uint8), 0, out=target.view(np.bool_), casting="unsafe")
        return
    if value.dtype == target.dtype:
        target[...] = value
        return
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # float64 beyond float32 becomes inf, as it would on the device
        np.copyto(target, value, casting="unsafe")


def result(port: Port, held: Array) -> Array:
    """A copy of `held` for the caller, in the port's `seen` dtype."""
    if held.dtype == port.seen:
        return held.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(held, dtype=port.seen, order="C", copy=True)


def _checked(port: Port, value: object) -> Array:
    if not isinstance(value, np.ndarray):
        raise InvalidArgument(
            f"input {port.name!r} is {type(value).__name__}; give a NumPy array of {_described(port)}"
        )
    if value.dtype != port.seen or value.shape != port.shape:
        raise InvalidArgument(
            f"input {port.name!r} is {value.dtype}{list(value.shape)} and must be {_described(port)}; "
            "convert it first"
        )
    if port.narrows and value.size:
        allowed = np.iinfo(port.held)
        low, high = int(value.min()), int(value.max())
        if low < allowed.min or high > allowed.max:
            raise InvalidArgument(
                f"input {port.name!r} holds {low if low < allowed.min else high}, and this model computes in "
                f"{port.held.name}; pass values from {allowed.min} to {allowed.max}"
            )
    return value


def _names_problem(wanted: tuple[Port, ...], given: Mapping[str, Array]) -> str:
    names = [port.name for port in wanted]
    missing = [repr(name) for name in names if name not in given]
    unknown = [repr(name) for name in given if name not in names]
    problems = [f"input {', '.join(missing)} is missing"] * bool(missing)
    problems += [f"input {', '.join(unknown)} is unknown"] * bool(unknown)
    listed = ", ".join(f"{port.name!r} as {_described(port)}" for port in wanted) or "none"
    return f"{' and '.join(problems)}; this model's inputs are {listed}"


def _described(port: Port) -> str:
    return f"{port.seen.name}{list(port.shape)}"
