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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument, ResourceExhausted
from honed.protocol.params import ROOM_ALIGN
from honed.protocol.wire import FrameLimits
from honed.runtime.dtypes import dtype

MEMORY = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # Bytes


class Region:
    """Shared memory of `nbytes` bytes; `array` places NumPy arrays in it. Close it after its last use."""

    def __init__(self, name: str, nbytes: int) -> None:
        """Reserve `nbytes` bytes.

        Raises InvalidArgument for a size below 1, and ResourceExhausted if memory is short.
        """
        if nbytes < 1:
            raise InvalidArgument(f"a region of {nbytes} bytes is not possible; ask for at least 1")
        if nbytes > MEMORY:  # The kernel would end processes before it says no
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
        """Whether `close` was called."""
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
        flat = (
            np.frombuffer(self._mapped, kind.numpy, math.prod(shape), start)
            if nbytes
            else np.empty(0, kind.numpy)
        )
        return flat.reshape(tuple(shape))

    def clear(self) -> None:
        """Forget the arrays placed so far: the next one lies at the start of the region."""
        self._used = 0

    def room(self, nbytes: int) -> int:
        """Reserve `nbytes` bytes after the arrays placed before, and return their offset in bytes."""
        start = -(-self._used // ROOM_ALIGN) * ROOM_ALIGN
        self._used = start + nbytes
        return start

    def offset_of(self, array: NDArray[Any]) -> int | None:
        """Return the offset of `array` in the region, in bytes; None where it lies elsewhere.

        Returns None for arrays that are not contiguous or empty, too.
        """
        start = array.ctypes.data - self._address
        if self.closed or start < 0 or start + array.nbytes > self.nbytes:
            return None
        return start if array.flags.c_contiguous and array.nbytes else None

    def close(self) -> None:
        """Close the descriptor; arrays of the region stay valid as long as they exist."""
        self._end()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_descriptor(descriptor: int, offset: int, byte_size: int) -> NDArray[np.uint8]:
    """Return the bytes of a region that the service has admitted; they are unmapped when the array goes."""
    return np.frombuffer(mmap.mmap(descriptor, byte_size, offset=offset), np.uint8)


# A tensor that goes over the socket is copied in and out of it twice on its way to the engine, in pieces of
# 128 KiB; one in shared memory once (docs/dev/measurements.md has times). No I/O: `calls` makes regions.
LARGE = 1 << 16  # Bytes of a request's tensors from which that is faster
MOST_SENT = FrameLimits().max_bytes  # Of a request that goes over the socket
_LEAST = 1 << 18  # Bytes of a region
_MOST = 1 << 29  # Bytes of a region that lies ready; a larger one is given back after its request
_KEPT = 4  # Regions that lie ready, for as many requests at once
_MODELS = 256  # Whose outputs' sizes are remembered


class Scratch:
    """The regions that lie ready, and what requests are known to need. Threads may share it."""

    def __init__(self) -> None:
        self._free: list[Region] = []
        self._dropped: list[Region] = []
        self._answers: dict[str, int] = {}  # Bytes of a model's outputs, the most there were

    def bytes_for(self, model: str, inputs: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a request to `model` takes for its inputs, and for its outputs.

        `inputs` are the sizes of the inputs in bytes. Returns (0, 0) where the request should not use a
        region.
        """
        given, room = _together(inputs), self._answers.get(model, 0)
        return (given, room) if LARGE <= given + room <= MEMORY else (0, 0)

    def check_sendable(self, inputs: Sequence[int], why: ResourceExhausted | None) -> None:
        """Raise what keeps large inputs out of shared memory, where a message cannot hold them either.

        `why` there is no region for them, None where none was asked for.
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

    def answered(self, model: str, outputs: Sequence[int]) -> None:
        """Remember of how many bytes the outputs of a request were that had no place of the app's."""
        if model not in self._answers and len(self._answers) >= _MODELS:
            del self._answers[next(iter(self._answers))]
        self._answers[model] = max(_together(outputs), self._answers.get(model, 0))

    def take(self, nbytes: int) -> Region | None:
        """Return the smallest free region of at least `nbytes` bytes; None where the caller must make one."""
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
        """Free a region for other requests: its request was answered, so nobody uses it any more."""
        if region.nbytes > _MOST:
            self.drop(region)
            return
        self._free.append(region)
        while len(self._free) > _KEPT:
            self.drop(self._free.pop(0))

    def drop(self, region: Region) -> None:
        """Mark a region to be forgotten, as the service may still be using it or nobody needs it."""
        self._dropped.append(region)

    @contextmanager
    def lent(self, region: Region) -> Iterator[None]:
        """Lend a region to one request; drop it where the request fails, as the request may run on."""
        try:
            yield
        except BaseException:
            self.drop(region)
            raise
        self.give_back(region)

    def dropped(self) -> Iterator[Region]:
        """Yield the regions that the caller is to close and have the service forget."""
        while self._dropped:
            yield self._dropped.pop()

    def close(self) -> None:
        """Release the regions that lie ready."""
        while self._free:
            self.drop(self._free.pop())


def region_bytes(nbytes: int) -> int:
    """Return the bytes of a region for `nbytes`: a power of two, so that requests of several sizes share it.

    Very large sizes stay as they are, as no such region is kept.
    """
    if nbytes > _MOST:
        return nbytes  # None lies ready
    return max(_LEAST, 1 << (nbytes - 1).bit_length())


def _together(nbytes: Sequence[int]) -> int:
    """Return the bytes that tensors of these sizes take at most, each aligned."""
    return sum(nbytes) + ROOM_ALIGN * len(nbytes)
