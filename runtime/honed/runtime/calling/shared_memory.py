"""Shared memory for tensors: memfds that cannot shrink, so that a mapping never faults.

A client creates a `Region` and works on NumPy views of it; the service checks its descriptor, and the worker
maps it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument, ResourceExhausted
from honed.protocol.values import ROOM_ALIGN
from honed.protocol.wire import Closing, FrameLimits
from honed.runtime.dtypes import dtype

MEMORY = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # Bytes


class Region(Closing):
    """Shared memory of `nbytes` bytes; `array` places NumPy arrays in it. Close it after its last use."""

    def __init__(self, name: str, nbytes: int) -> None:
        """Reserve `nbytes` bytes.

        Raises InvalidArgument for a size below 1, and ResourceExhausted if memory is short.
        """
        if nbytes < 1:
            raise InvalidArgument(f"a region of {nbytes} bytes is not possible; ask for at least 1")
        if nbytes > MEMORY:  # The kernel would kill processes before it refused
            raise ResourceExhausted(
                f"a region of {nbytes} bytes is more than the machine's memory, {MEMORY}; ask for less"
            )
        self.name = name
        self.nbytes = nbytes
        self.descriptor = os.memfd_create(f"honed-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # This call reserves the pages now, so that running out of memory is an error and no SIGBUS.
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
        """Return whether `close` was called."""
        return not self._end.alive

    def array(self, dtype_name: str, shape: Sequence[int], offset: int | None = None) -> NDArray[Any]:
        """Return a view of the region as an array of NumPy type `dtype_name` and `shape`.

        `offset` is in bytes; None places the array after the ones placed before, at a multiple of 64. Raises
        InvalidArgument if the array does not fit.
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
        return np.ndarray(tuple(shape), kind.numpy, self._mapped, start)

    def clear(self) -> None:
        """Forget the arrays placed so far: the next one lies at the start of the region."""
        self._used = 0

    def room(self, nbytes: int) -> int:
        """Reserve `nbytes` bytes after the arrays placed before, and return their offset in bytes."""
        start = -(-self._used // ROOM_ALIGN) * ROOM_ALIGN
        self._used = start + nbytes
        return start

    def offset_of(self, array: NDArray[Any]) -> int | None:
        """Return the offset of `array` in the region, in bytes; None if it lies elsewhere.

        Returns None for empty arrays and arrays that are not contiguous, too.
        """
        start = array.ctypes.data - self._address
        if self.closed or start < 0 or start + array.nbytes > self.nbytes:
            return None
        return start if array.flags.c_contiguous and array.nbytes else None

    def close(self) -> None:
        """Close the descriptor; arrays of the region stay valid as long as they exist."""
        self._end()


def map_descriptor(descriptor: int, offset: int, byte_size: int) -> NDArray[np.uint8]:
    """Return the bytes of a region that the service has checked; they are unmapped with the array."""
    return np.frombuffer(mmap.mmap(descriptor, byte_size, offset=offset), np.uint8)


# A tensor that goes over the socket is copied in and out of it twice on its way to the engine, in pieces of
# 128 KiB; one in shared memory once (docs/dev/measurements.md has times). No I/O: `calls` makes regions.
LARGE = 1 << 16  # Bytes of a request's tensors from which shared memory is faster
MOST_SENT = FrameLimits().max_bytes  # Largest total size of a message's tensors, in bytes
_LEAST = 1 << 18  # Smallest region, in bytes
_MOST = 1 << 29  # Largest region kept for later requests, in bytes
_KEPT = 4  # Regions kept for later requests
_MODELS = 256  # Models whose output sizes are remembered


class Scratch:
    """The regions kept for later requests, and the sizes that requests need. Threads may share it."""

    def __init__(self) -> None:
        self._free: list[Region] = []
        self._dropped: list[Region] = []
        self._answers: dict[str, int] = {}  # Largest total size of a model's outputs so far, in bytes

    def bytes_for(self, model: str, inputs: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a request to `model` takes for its inputs, and for its outputs.

        `inputs` are the sizes of the inputs in bytes. Returns (0, 0) if the request should not use a region.
        """
        given, room = _together(inputs), self._answers.get(model, 0)
        return (given, room) if LARGE <= given + room <= MEMORY else (0, 0)

    def check_sendable(self, inputs: Sequence[int], why: ResourceExhausted | None) -> None:
        """Raise the reason why large inputs are not in shared memory, if a message cannot hold them either.

        `why` is the error of reserving a region, None if none was requested.
        """
        whole = sum(inputs)
        if whole <= MOST_SENT:
            return
        if why is not None:
            raise why
        if _together(inputs) > MEMORY:
            raise ResourceExhausted(
                f"the request's tensors have {whole} bytes, and a client shares at most {MEMORY} by itself; "
                "place them in a region of your own (the client's `region`)"
            )

    def note_sizes(self, model: str, outputs: Sequence[int]) -> None:
        """Remember the sizes in bytes of the outputs that were not written to arrays of the app's."""
        if model not in self._answers and len(self._answers) >= _MODELS:
            del self._answers[next(iter(self._answers))]
        self._answers[model] = max(_together(outputs), self._answers.get(model, 0))

    def take(self, nbytes: int) -> Region | None:
        """Return the smallest free region of at least `nbytes` bytes; None if the caller must create one."""
        large = [region for region in list(self._free) if region.nbytes >= nbytes]
        for region in sorted(large, key=lambda region: region.nbytes):
            try:
                self._free.remove(region)
            except ValueError:
                continue  # Another thread took it
            region.clear()
            return region
        return None

    def give_back(self, region: Region) -> None:
        """Free a region, whose request was answered, for other requests."""
        if region.nbytes > _MOST:
            self.drop(region)
            return
        self._free.append(region)
        while len(self._free) > _KEPT:
            self.drop(self._free.pop(0))

    def drop(self, region: Region) -> None:
        """Mark a region to be forgotten, as the service may still be using it or no request needs it."""
        self._dropped.append(region)

    @contextmanager
    def lend(self, region: Region) -> Iterator[None]:
        """Lend a region to one request; drop it if the request fails, as the service may still run it."""
        try:
            yield
        except BaseException:
            self.drop(region)
            raise
        self.give_back(region)

    def take_dropped(self) -> Iterator[Region]:
        """Yield dropped regions, which the caller closes and unregisters."""
        while self._dropped:
            yield self._dropped.pop()

    def close(self) -> None:
        """Drop the regions kept for later requests."""
        while self._free:
            self.drop(self._free.pop())


def region_bytes(nbytes: int) -> int:
    """Return the size of a region for `nbytes`: a power of two, so that requests of several sizes share it.

    Sizes above _MOST stay as they are, as no such region is kept.
    """
    if nbytes > _MOST:
        return nbytes  # A region this large is not kept
    return max(_LEAST, 1 << (nbytes - 1).bit_length())


def _together(nbytes: Sequence[int]) -> int:
    """Return the largest total size of tensors of these sizes, with alignment, in bytes."""
    return sum(nbytes) + ROOM_ALIGN * len(nbytes)
