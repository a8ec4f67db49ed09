"""Device buffers between guard bands, and host memory between pages that may not be touched."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine.opencl import cl
from honed.tuner.lower.program import MemoryValue

GUARD_BYTES = 64 << 10  # on each side; a multiple of every base alignment, and of a page
FENCE_ALIGNED = 128  # as the largest vector is
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_LEAST_BYTES = 64  # OpenCL has no empty sub-buffer

Bytes = NDArray[np.uint8]


class Guarded:
    """One tensor's memory: a sub-buffer of an allocation that holds a guard band on either side.

    `buffer` is what kernels are given. The first byte beyond the tensor belongs to the band behind it,
    padding included.
    """

    def __init__(self, context: Any, value: MemoryValue) -> None:
        """Allocate; raises pyopencl's errors."""
        self.value = value
        self.nbytes = value.nbytes
        self._whole = GUARD_BYTES + _padded(self.nbytes) + GUARD_BYTES
        self._allocation = cl.Buffer(context, cl.mem_flags.READ_WRITE, self._whole)
        self.buffer: Any = self._allocation.get_sub_region(GUARD_BYTES, max(self.nbytes, _LEAST_BYTES))
        self._host: Bytes = np.empty(self._whole, np.uint8)

    @staticmethod
    def allocated(value: MemoryValue) -> int:
        """Bytes of device memory a tensor takes with its bands."""
        return 2 * GUARD_BYTES + _padded(value.nbytes)

    def poison(self, queue: Any, byte: int) -> None:
        """Fill the tensor and its bands, without waiting."""
        cl.enqueue_fill_buffer(queue, self._allocation, np.uint32(byte * 0x01010101), 0, self._whole)

    def poison_inside(self, queue: Any, byte: int) -> None:
        """Fill the tensor (and what pads it), without waiting."""
        size = _padded(self.nbytes)
        cl.enqueue_fill_buffer(queue, self._allocation, np.uint32(byte * 0x01010101), GUARD_BYTES, size)

    def write(self, queue: Any, array: NDArray[Any]) -> None:
        """Copy the tensor in, and wait."""
        if self.nbytes:
            cl.enqueue_copy(queue, self.buffer, array, is_blocking=True)

    def fetch(self, queue: Any, *, inside: bool) -> None:
        """Copy the bands to the host, with `inside` the tensor too, and wait."""
        end = GUARD_BYTES + self.nbytes
        if inside:
            cl.enqueue_copy(queue, self._host, self._allocation, is_blocking=True)
            return
        cl.enqueue_copy(queue, self._host[:GUARD_BYTES], self._allocation, is_blocking=True)
        cl.enqueue_copy(queue, self._host[end:], self._allocation, src_offset=end, is_blocking=True)

    @property
    def bands(self) -> tuple[Bytes, Bytes]:
        """The bands before and behind the tensor, as last fetched."""
        return self._host[:GUARD_BYTES], self._host[GUARD_BYTES + self.nbytes :]

    @property
    def array(self) -> NDArray[Any]:
        """The tensor as last fetched: a view that the next fetch overwrites."""
        inside = self._host[GUARD_BYTES : GUARD_BYTES + self.nbytes]
        return inside.view(np.dtype(self.value.dtype)).reshape(self.value.shape)

    def release(self) -> None:
        """Give the memory back; only on a context that did not fail."""
        self.buffer.release()
        self._allocation.release()


class Fenced:
    """One tensor's memory on a device that shares the host's, beside a page that may not be touched.

    A kernel that reads or writes past its end, with `before` before its start, ends this process, whatever
    becomes of the value. Ends are told to `FENCE_ALIGNED` bytes, by which tensors must be aligned.
    """

    def __init__(self, context: Any, value: MemoryValue, *, before: bool = False) -> None:
        """Map it; raises MemoryError, and pyopencl's errors."""
        libc, page = _libc(), mmap.PAGESIZE
        self.nbytes = max(value.nbytes, 1)
        room = -(-(self.nbytes + FENCE_ALIGNED) // page) * page
        self._length = room + 2 * page
        self._base = libc.mmap(None, self._length, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, -1, 0)
        if self._base == ctypes.c_void_p(-1).value:
            raise MemoryError
        for place in (self._base, self._base + page + room):
            if libc.mprotect(place, page, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        end = self._base + page + room
        start = self._base + page if before else (end - self.nbytes) // FENCE_ALIGNED * FENCE_ALIGNED
        self.host: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(start))
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        self.buffer: Any = cl.Buffer(context, flags, hostbuf=self.host)

    def release(self) -> None:
        """Give the memory back, which nothing may use any more."""
        self.buffer.release()
        _libc().munmap(self._base, self._length)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _padded(nbytes: int) -> int:
    return max(-(-nbytes // _LEAST_BYTES) * _LEAST_BYTES, _LEAST_BYTES)
