"""Holds the shared-memory regions of connections in the service."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os

from honed.protocol.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from honed.protocol.methods import check_name
from honed.protocol.params import RegionParams

_NO_WRITING = fcntl.F_SEAL_WRITE | 0x0010  # F_SEAL_FUTURE_WRITE, linux/fcntl.h
_numbers = itertools.count(1)  # Worker and service name regions by number: names are per connection


class HeldRegion:
    """A registered region with a count of holders; the last one to release it closes its descriptor."""

    def __init__(self, name: str, descriptor: int, offset: int, byte_size: int) -> None:
        """Initialise with one holder; the region owns the descriptor."""
        self.number = next(_numbers)
        self.name = name
        self.descriptor = descriptor
        self.offset = offset
        self.byte_size = byte_size
        self._holders = 1

    def hold(self) -> None:
        """Keep the region open until `release`."""
        self._holders += 1

    def release(self) -> bool:
        """Release the region; return True if this was the last holder and the descriptor is closed."""
        self._holders -= 1
        if self._holders:
            return False
        os.close(self.descriptor)
        return True

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of bytes within the region; raise InvalidArgument if they are not all inside."""
        self.check_range(offset, nbytes)
        return os.pread(self.descriptor, nbytes, self.offset + offset)

    def check_range(self, offset: int, nbytes: int) -> None:
        """Raise InvalidArgument if the bytes are not all inside the region."""
        if offset < 0 or offset + nbytes > self.byte_size:
            raise InvalidArgument(
                f"bytes {offset} to {offset + nbytes} are outside region {self.name!r}, which has "
                f"{self.byte_size}; correct shared_memory_offset or register a larger region"
            )


def region_not_found(name: str) -> NotFound:
    """Return the error for a request that names a region which is not registered."""
    return NotFound(f"there is no region {name[:80]!r} on this connection; register it first")


class RegionTable:
    """The regions of a connection by name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._regions: dict[str, HeldRegion] = {}
        self.changes = 0  # Number of changes: the regions are unchanged while it is

    def add(self, params: RegionParams, descriptor: int) -> None:
        """Register a client's memfd; the caller keeps the descriptor, the table a duplicate.

        Raises InvalidArgument, AlreadyExists or ResourceExhausted.
        """
        check_name(params.name, "region")
        if params.name in self._regions:
            raise AlreadyExists(f"region {params.name!r} is registered already; unregister it first")
        if len(self._regions) >= self._limit:
            raise ResourceExhausted(f"{self._limit} regions are registered already; unregister some")
        offset = params.offset or 0
        check_memfd(descriptor, offset, params.byte_size)
        self._regions[params.name] = HeldRegion(params.name, os.dup(descriptor), offset, params.byte_size)
        self.changes += 1

    def get(self, name: str) -> HeldRegion:
        """Return the region of that name; raise NotFound if there is none."""
        found = self._regions.get(name)
        if found is None:
            raise region_not_found(name)
        return found

    def select(self, name: str | None) -> list[HeldRegion]:
        """Return the region of that name, or all; raise NotFound if there is none of that name."""
        return [self.get(name)] if name else list(self._regions.values())

    def remove(self, name: str | None) -> list[HeldRegion]:
        """Remove and return the region of that name, or all; the caller releases them."""
        removed = self.select(name)
        for region in removed:
            del self._regions[region.name]
            self.changes += 1
        return removed


def check_memfd(descriptor: int, offset: int, byte_size: int) -> None:
    """Raise InvalidArgument unless the descriptor is a memfd that may be mapped for this range for good."""
    if offset < 0 or offset % mmap.PAGESIZE:
        raise InvalidArgument(
            f"offset {offset} is not a multiple of {mmap.PAGESIZE}; start the region on a page"
        )
    if byte_size < 1:
        raise InvalidArgument(f"a region of {byte_size} bytes is not possible; ask for at least 1")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidArgument("the descriptor is not a memfd; make it with memfd_create") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidArgument("the memfd can still shrink; seal it with F_SEAL_SHRINK before registering it")
    if seals & _NO_WRITING or fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise InvalidArgument(
            "the memfd cannot be written; open it for reading and writing, without write seals"
        )
    size = os.fstat(descriptor).st_size
    if offset + byte_size > size:
        raise InvalidArgument(
            f"the memfd has {size} bytes and the region would end at byte {offset + byte_size}; "
            "size the memfd before registering it"
        )
    try:
        mmap.mmap(descriptor, byte_size, offset=offset).close()
    except (OSError, ValueError, OverflowError) as error:  # Huge pages, more than there are addresses
        raise InvalidArgument(
            f"the memfd cannot be mapped ({error}); use an ordinary one, or less of it"
        ) from error
