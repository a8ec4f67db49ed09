"""Tensors of strings as they travel: the length of each as 4 bytes, little-endian, and its bytes in UTF-8.

So the Open Inference Protocol has them (BYTES, binary tensor data). In Python they are arrays of `str`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument

Array = NDArray[Any]
_LENGTH = struct.Struct("<I")


def is_text(array: Array) -> bool:
    """Whether an array is of strings, or of bytes that are text."""
    return array.dtype.kind in "USO"


def encode(array: Array) -> bytes:
    """Its elements, row-major; raises InvalidArgument where one is neither text nor bytes."""
    parts: list[bytes] = []
    for element in array.reshape(-1):
        if not isinstance(element, str | bytes):
            raise InvalidArgument(
                f"an element is {type(element).__name__}, where text is wanted; give str or bytes"
            )
        data = element.encode(errors="surrogateescape") if isinstance(element, str) else bytes(element)
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def decode(data: bytes | memoryview, shape: Sequence[int]) -> Array:
    """An array of `str` and that shape; raises InvalidArgument where the bytes are not so many elements."""
    whole, at = memoryview(data), 0
    found = np.empty(math.prod(shape), object)
    for index in range(found.size):
        if at + _LENGTH.size > len(whole):
            raise _broken(index, found.size)
        (size,) = _LENGTH.unpack_from(whole, at)
        at += _LENGTH.size
        if size > len(whole) - at:
            raise _broken(index, found.size)
        found[index] = bytes(whole[at : at + size]).decode(errors="surrogateescape")
        at += size
    if at != len(whole):
        raise _broken(found.size, found.size)
    return found.reshape(tuple(shape))


def _broken(index: int, count: int) -> InvalidArgument:
    where = f"end within element {index}" if index < count else "go on"
    return InvalidArgument(
        f"the bytes of a tensor of {count} strings {where}; write each one's length as 4 bytes in front of it"
    )
