"""Requests of the library, with NumPy's arrays for its pointers."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .binding import CODES, Library

Floats = NDArray[np.float32]
_TYPES = {CODES["FP32"]: np.float32, CODES["INT64"]: np.int64}


@contextlib.contextmanager
def opened(library: Library, path: Path | str) -> Iterator[int]:
    """A connection, by its pointer."""
    service = library.service_new(str(path))
    assert service is not None
    try:
        yield service
    finally:
        library.service_free(service)


def floats(address: int, count: int) -> Floats:
    """What lies there."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def output(library: Library, tensor: int) -> NDArray[Any]:
    """A copy of an output."""
    shape = library.tensor_shape(tensor)[: library.tensor_rank(tensor)]
    data = ctypes.string_at(library.tensor_data(tensor), library.tensor_bytes(tensor))
    return np.frombuffer(data, _TYPES[library.tensor_type(tensor)]).reshape(shape)


class Request:
    """A honed_request, which keeps the arrays that are its inputs."""

    def __init__(self, library: Library, service: int, model: str) -> None:
        self.library = library
        self.c = library.request_new(service, model)
        self._kept: dict[str, NDArray[Any]] = {}

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def input(self, name: str, array: NDArray[Any]) -> None:
        """An array that is sent as it is when the call is made."""
        kind = next(number for number, known in _TYPES.items() if array.dtype == known)
        self._kept[name] = array
        shape, address = list(array.shape), ctypes.c_void_p(array.ctypes.data)
        assert self.library.request_input(self.c, name, kind, shape, array.ndim, address) == CODES["OK"]

    def infer(self) -> int:
        code: int = self.library.infer(self.c)
        return code

    @property
    def error(self) -> str:
        return str(self.library.request_error(self.c))

    def outputs(self) -> dict[str, NDArray[Any]]:
        """Copies of the outputs of the last call, by name."""
        given = [
            self.library.request_output(self.c, i) for i in range(self.library.request_output_count(self.c))
        ]
        return {self.library.tensor_name(tensor): output(self.library, tensor) for tensor in given}

    def free(self) -> None:
        self.library.request_free(self.c)
