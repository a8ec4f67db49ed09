"""Tensors as JSON, and what is said of them there, to and from the bytes that honed takes. Without I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument
from honed.runtime.dtypes import DType, from_datatype

_MAX_RANK: Final = 16
_MAX_ELEMENTS: Final = 1 << 40
_MOST_WHOLE: Final = 1 << 64  # written without a point


def kind_of(datatype: object, name: str) -> DType:
    """The element type of a tensor; raises InvalidArgument for those that no model of honed has."""
    if datatype == "BF16":
        raise InvalidArgument(f"{name!r} is BF16, which honed does not carry; send FP32 or FP16")
    if datatype == "BYTES":
        raise InvalidArgument(f"{name!r} is BYTES, and no model of honed takes or gives texts; send numbers")
    if not isinstance(datatype, str):
        raise InvalidArgument(f"datatype of {name!r} must be a text, as 'FP32'")
    return from_datatype(datatype)


def shape_of(value: object, name: str) -> tuple[int, ...]:
    """A shape as JSON says it; raises InvalidArgument for all that is none."""
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        raise InvalidArgument(f"shape of {name!r} must be a list of at most {_MAX_RANK} sizes")
    if (
        not all(type(size) is int and 0 <= size < 1 << 63 for size in value)
        or math.prod(value) > _MAX_ELEMENTS
    ):
        raise InvalidArgument(f"shape of {name!r} must be a list of sizes, which are not negative")
    return tuple(value)


def from_json(data: object, kind: DType, shape: tuple[int, ...], name: str) -> memoryview:
    """The bytes of a tensor whose elements are JSON numbers or booleans, nested as its shape or in one list.

    Raises InvalidArgument where there are too many or too few, or one is not of that type.
    """
    if kind.name == "float16":
        raise InvalidArgument(f"{name!r} is FP16, which JSON does not carry; send it as binary data")
    flat = _flat(data, shape, name)
    _check_elements(flat, kind, name)
    array = np.array(flat, kind.numpy)
    return array.view(np.uint8).data


def to_json(content: bytes | memoryview, kind: DType, name: str) -> list[Any]:
    """The elements of a tensor in one list; raises InvalidArgument where JSON cannot carry them."""
    if kind.name == "float16":
        raise InvalidArgument(f"{name!r} is FP16, which JSON does not carry; ask for binary_data")
    array: NDArray[Any] = np.frombuffer(content, kind.numpy)
    if kind.floating and not np.isfinite(array).all():
        raise InvalidArgument(f"{name!r} has NaN or infinity, which JSON does not carry; ask for binary_data")
    elements: list[Any] = array.tolist()
    return elements


def _flat(data: object, shape: tuple[int, ...], name: str) -> Sequence[object]:
    if not isinstance(data, list):
        raise InvalidArgument(f"data of {name!r} must be a list")
    wanted = math.prod(shape)
    flat: list[object] = data
    if data and isinstance(data[0], list):
        for size in shape[1:]:
            if not all(isinstance(row, list) and len(row) == size for row in flat):
                raise InvalidArgument(f"data of {name!r} is not nested as its shape {list(shape)}")
            flat = list(itertools.chain.from_iterable(flat))  # type: ignore[arg-type]
    if len(flat) != wanted:
        raise InvalidArgument(
            f"data of {name!r} has {len(flat)} elements, and its shape {list(shape)} {wanted}"
        )
    return flat


def _check_elements(flat: Sequence[object], kind: DType, name: str) -> None:
    types = set(map(type, flat))
    if kind.name == "bool":
        right, told = types <= {bool}, "true or false"
    elif kind.floating:
        right, told = types <= {int, float}, "numbers"
    else:
        bounds = np.iinfo(kind.name)
        told = f"whole numbers from {bounds.min} to {bounds.max}"
        right = types <= {int} and (not flat or (min(flat) >= bounds.min and max(flat) <= bounds.max))  # type: ignore[type-var,operator]
    if not right:
        raise InvalidArgument(f"data of {name!r} is {kind.datatype}; give {told}")
    if kind.floating and int in types and not all(abs(each) < _MOST_WHOLE for each in flat):  # type: ignore[arg-type]
        raise InvalidArgument(f"data of {name!r} has a whole number beyond 2^64; write it as 1e30")
