"""The types and encodings in which values travel: element types by each name, text, and lists of maps.

Open Inference Protocol names are on the socket, NumPy names (or ml_dtypes') in Python and in `.honed` files,
OpenCL C names in kernels, ONNX's in files and ONNX Runtime. A bool is one byte, 0 or 1, everywhere.

Tensors of strings have the length of each as 4 bytes, little-endian, and its bytes in UTF-8, as the Open
Inference Protocol defines BYTES (binary tensor data). In Python they are arrays of `str`.

Classifiers of the ai.onnx.ml domain return lists of maps (ZipMap). Every map of such a list has the same
keys, so that it travels as its keys, [classes], and a row of values for each map, float32 [maps, classes].
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from honed.protocol.errors import InvalidArgument

if TYPE_CHECKING:  # The service runs without NumPy, which would double its memory when idle
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DType:
    """An element type with its size, and its name in each of NumPy, the protocol, OpenCL C and ONNX."""

    name: str  # NumPy's
    datatype: str  # The Open Inference Protocol's
    opencl: str  # OpenCL C's; "" for those that are not compiled
    itemsize: int  # Bytes; 0: each element has its own
    onnx: str  # ONNX Runtime's, as in "tensor(float)"
    number: int  # From onnx.proto; not every version of onnx has names for all of them

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype. Raises InvalidArgument if the type needs ml_dtypes and that is not installed."""
        return _numpy(self.name)

    @property
    def floating(self) -> bool:
        """Return whether elements are floating-point; False for bfloat16."""
        return self.name.startswith("float")


DTYPES: tuple[DType, ...] = (
    DType("bool", "BOOL", "uchar", 1, "bool", 9),
    DType("uint8", "UINT8", "uchar", 1, "uint8", 2),
    DType("uint16", "UINT16", "ushort", 2, "uint16", 4),
    DType("uint32", "UINT32", "uint", 4, "uint32", 12),
    DType("uint64", "UINT64", "ulong", 8, "uint64", 13),
    DType("int8", "INT8", "char", 1, "int8", 3),
    DType("int16", "INT16", "short", 2, "int16", 5),
    DType("int32", "INT32", "int", 4, "int32", 6),
    DType("int64", "INT64", "long", 8, "int64", 7),
    DType("float16", "FP16", "half", 2, "float16", 10),
    DType("float32", "FP32", "float", 4, "float", 1),
    DType("float64", "FP64", "double", 8, "double", 11),
)
# Types that only the CPU engine takes, with ml_dtypes' names. A 4-bit or 2-bit element takes a whole byte in
# arrays.
NARROW: tuple[DType, ...] = (
    DType("bfloat16", "BF16", "", 2, "bfloat16", 16),
    DType("float8_e4m3fn", "FP8E4M3FN", "", 1, "float8e4m3fn", 17),
    DType("float8_e4m3fnuz", "FP8E4M3FNUZ", "", 1, "float8e4m3fnuz", 18),
    DType("float8_e5m2", "FP8E5M2", "", 1, "float8e5m2", 19),
    DType("float8_e5m2fnuz", "FP8E5M2FNUZ", "", 1, "float8e5m2fnuz", 20),
    DType("float8_e8m0fnu", "FP8E8M0", "", 1, "float8e8m0", 24),
    DType("int4", "INT4", "", 1, "int4", 22),
    DType("uint4", "UINT4", "", 1, "uint4", 21),
    DType("int2", "INT2", "", 1, "int2", 26),
    DType("uint2", "UINT2", "", 1, "uint2", 25),
)
# Text as in the Open Inference Protocol; its size in bytes does not follow from its shape.
STRING = DType("string", "BYTES", "", 0, "string", 8)
CARRIED: tuple[DType, ...] = (*DTYPES, *NARROW, STRING)
_BY_NAME = {d.name: d for d in CARRIED}
_BY_DATATYPE = {d.datatype: d for d in CARRIED}
_BY_ONNX = {f"tensor({d.onnx})": d for d in CARRIED}
_NARROW = frozenset(d.name for d in NARROW)
# Type of the keys by ONNX Runtime's type of a list of maps (ONNX operators, ai.onnx.ml, ZipMap).
MAP_KEYS: Final = {
    "seq(map(int64,tensor(float)))": "int64",
    "seq(map(string,tensor(float)))": STRING.name,
}
_LENGTH = struct.Struct("<I")


@functools.cache
def _numpy(name: str) -> np.dtype[np.generic]:
    import numpy as np

    if name == STRING.name:
        return np.dtype(object)
    if name not in _NARROW:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise InvalidArgument(
            f"arrays of {name} need ml_dtypes, which is not installed; pip install ml_dtypes"
        ) from error
    found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
    return found


def dtype(name: str) -> DType:
    """Return the type that NumPy calls `name`; raise InvalidArgument if honed does not carry it."""
    found = _BY_NAME.get(name)
    if found is None:
        raise InvalidArgument(f"element type {name!r} is not supported; use one of {', '.join(_BY_NAME)}")
    return found


def from_datatype(datatype: str) -> DType:
    """Return the type the Open Inference Protocol calls `datatype`; raise InvalidArgument for others."""
    found = _BY_DATATYPE.get(datatype)
    if found is None:
        raise InvalidArgument(f"datatype {datatype!r} is not supported; use one of {', '.join(_BY_DATATYPE)}")
    return found


def is_text(array: NDArray[Any]) -> bool:
    """Return whether the elements are str, bytes or Python objects, which travel as text."""
    return array.dtype.kind in "USO"


def from_onnx(type_name: str) -> DType | None:
    """Return the type ONNX Runtime calls `type_name`, as in "tensor(float)"; None for unsupported types."""
    return _BY_ONNX.get(type_name)


def encode_text(array: NDArray[Any]) -> bytes:
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


def decode_text(data: bytes | memoryview, shape: Sequence[int]) -> NDArray[Any]:
    """Return an array of `str` with that shape.

    Raises InvalidArgument if the bytes do not hold exactly that number of elements.
    """
    import numpy as np

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


def encode_maps(maps: Sequence[Mapping[Any, float]], key_type: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the keys and the values of maps as arrays; raise ValueError if two maps differ in their keys.

    The values are float32, one row for each map.
    """
    import numpy as np

    keys = list(maps[0]) if maps else []
    if any(list(each) != keys for each in maps):
        raise ValueError("its maps have different keys")
    kept = np.array(keys, object if key_type == STRING.name else key_type)
    return kept, np.array([list(each.values()) for each in maps], np.float32).reshape(len(maps), len(keys))
