"""The element types that honed carries, under each of their names.

Open Inference Protocol names are on the socket, NumPy names (or ml_dtypes') in Python and in `.honed` files,
OpenCL C names in kernels, ONNX's in files and ONNX Runtime. A bool is one byte, 0 or 1, everywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
# Text as in the Open Inference Protocol (`encodings.py`); its size in bytes does not follow from its shape.
STRING = DType("string", "BYTES", "", 0, "string", 8)
CARRIED: tuple[DType, ...] = (*DTYPES, *NARROW, STRING)
_BY_NAME = {d.name: d for d in CARRIED}
_BY_DATATYPE = {d.datatype: d for d in CARRIED}
_BY_ONNX = {f"tensor({d.onnx})": d for d in CARRIED}
_NARROW = frozenset(d.name for d in NARROW)


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
