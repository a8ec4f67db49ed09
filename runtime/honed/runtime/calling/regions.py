"""Shared memory for tensors: memfds that cannot shrink, so that a mapping never faults.

A client makes a `Region` and works on NumPy views of it; the service admits the descriptor it is given
and its worker maps it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument, ResourceExhausted
from honed.protocol.params import ROOM_ALIGN
from honed.runtime.dtypes import dtype

MEMORY = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # bytes


class Region:
    """Shared memory of `nbytes` bytes; `array` places NumPy arrays in it. Close it after its last use."""

    def __init__(self, name: str, nbytes: int) -> None:
        """Raises InvalidArgument for a size below 1, ResourceExhausted where memory is short."""
        if nbytes < 1:
            raise InvalidArgument(f"a region of {nbytes} bytes is not possible; ask for at least 1")
        if nbytes > MEMORY:  # the kernel would end processes before it says no
            raise ResourceExhausted(
                f"a region of {nbytes} bytes is more than the machine's memory, {MEMORY}; ask for less"
            )
        self.name = name
        self.nbytes = nbytes
        self.descriptor = os.memfd_create(f"honed-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # posix_fallocate gives the pages now, so that running out of memory is an error and no SIGBUS.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._mapped = mmap.mmap(self.descriptor, nbytes)
        except OSError as error:
            os.close(self.descriptor)
            raise ResourceExhausted(
                f"there is no memory for a region of {nbytes} bytes ({error.strerror}); ask for less"
            ) from error
        self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data
        self._used = 0
        self._end = weakref.finalize(self, os.close, self.descriptor)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._end.alive

    def array(self, dtype_name: str, shape: Sequence[int], offset: int | None = None) -> NDArray[Any]:
        """A view of the region as an array of NumPy type `dtype_name` and `shape`.

        `offset` is in bytes; None places the array behind the ones placed before it. Raises
        InvalidArgument where it does not fit.
        """
        kind = dtype(dtype_name)
        nbytes = kind.itemsize * math.prod(shape)
        start = -(-self._used // ROOM_ALIGN) * ROOM_ALIGN if offset is None else offset
        if self.closed or start < 0 or start % kind.itemsize or start + nbytes > self.nbytes:
            raise InvalidArgument(
                f"an array of {nbytes} bytes does not fit at offset {start} of region {self.name!r} "
                f"({self.nbytes} bytes{', closed' if self.closed else ''}); make the region larger"
            )
        if offset is None:
            self._used = start + nbytes
        flat = (
            np.frombuffer(self._mapped, kind.numpy, math.prod(shape), start)
            if nbytes
            else np.empty(0, kind.numpy)
        )
        return flat.reshape(tuple(shape))

    def clear(self) -> None:
        """Forget which arrays were placed; the next lies at the start."""
        self._used = 0

    def room(self, nbytes: int) -> int:
        """Set so many bytes aside, behind the arrays that were placed before; their offset in bytes."""
        start = -(-self._used // ROOM_ALIGN) * ROOM_ALIGN
        self._used = start + nbytes
        return start

    def offset_of(self, array: NDArray[Any]) -> int | None:
        """Where in the region `array` lies, in bytes, or None where it does not or is not contiguous."""
        start = array.ctypes.data - self._address
        if self.closed or start < 0 or start + array.nbytes > self.nbytes:
            return None
        return start if array.flags.c_contiguous and array.nbytes else None

    def close(self) -> None:
        """Give the descriptor back; arrays made from the region stay valid until they go."""
        self._end()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_descriptor(descriptor: int, offset: int, byte_size: int) -> NDArray[np.uint8]:
    """The bytes of a region that the service has admitted; unmapped when the array goes."""
    return np.frombuffer(mmap.mmap(descriptor, byte_size, offset=offset), np.uint8)
