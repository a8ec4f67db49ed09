"""Encodes values that are no plain tensors: text, and lists of maps.

Tensors of strings have the length of each as 4 bytes, little-endian, and its bytes in UTF-8, as the Open
Inference Protocol defines BYTES (binary tensor data). In Python they are arrays of `str`.

Classifiers of the ai.onnx.ml domain return lists of maps (ZipMap). Every map of such a list has the same
keys, so that it travels as its keys, [classes], and a row of values for each map, float32 [maps, classes].
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument

from .dtypes import STRING

Array = NDArray[Any]
_LENGTH = struct.Struct("<I")
# Type of the keys by ONNX Runtime's type of the list (ONNX operators, ai.onnx.ml, ZipMap).
MAP_KEYS: Final = {
    "seq(map(int64,tensor(float)))": "int64",
    "seq(map(string,tensor(float)))": STRING.name,
}


def encode_text(array: Array) -> bytes:
    """Return an array's elements as bytes, row-major; raise InvalidArgument unless all are str or bytes."""
    parts: list[bytes] = []
    for element in array.reshape(-1):
        if not isinstance(element, str | bytes):
            raise InvalidArgument(
                f"an element is {type(element).__name__}, where text is wanted; give str or bytes"
            )
        data = element.encode(errors="surrogateescape") if isinstance(element, str) else bytes(element)
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def decode_text(data: bytes | memoryview, shape: Sequence[int]) -> Array:
    """Return an array of `str` with that shape.

    Raises InvalidArgument if the bytes do not hold exactly that number of elements.
    """
    whole, at = memoryview(data), 0
    found = np.empty(math.prod(shape), object)
    for index in range(found.size):
        if at + _LENGTH.size > len(whole):
            raise _damage_error(index, found.size)
        (size,) = _LENGTH.unpack_from(whole, at)
        at += _LENGTH.size
        if size > len(whole) - at:
            raise _damage_error(index, found.size)
        found[index] = bytes(whole[at : at + size]).decode(errors="surrogateescape")
        at += size
    if at != len(whole):
        raise _damage_error(found.size, found.size)
    return found.reshape(tuple(shape))


def _damage_error(index: int, count: int) -> InvalidArgument:
    where = f"end within element {index}" if index < count else "go on"
    return InvalidArgument(
        f"the bytes of a tensor of {count} strings {where}; write each one's length as 4 bytes in front of it"
    )


def maps_names(output: str) -> tuple[str, str]:
    """Return the names of the two tensors, keys and values, that carry an output that is a list of maps."""
    return f"{output}.keys", f"{output}.values"


def encode_maps(maps: Sequence[Mapping[Any, float]], key_type: str) -> tuple[Array, Array]:
    """Return the keys and the values of maps as arrays; raise ValueError if two maps differ in their keys.

    The values are float32, one row for each map.
    """
    keys = list(maps[0]) if maps else []
    if any(list(each) != keys for each in maps):
        raise ValueError("its maps have different keys")
    kept = np.array(keys, object if key_type == STRING.name else key_type)
    return kept, np.array([list(each.values()) for each in maps], np.float32).reshape(len(maps), len(keys))
