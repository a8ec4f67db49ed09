"""Which descriptors may be mapped: the service's check of what a client registers. No NumPy."""

from __future__ import annotations

import fcntl
import mmap
import os

from honed.protocol.errors import InvalidArgument

_NO_WRITING = fcntl.F_SEAL_WRITE | 0x0010  # F_SEAL_FUTURE_WRITE, linux/fcntl.h


def check(descriptor: int, offset: int, byte_size: int) -> None:
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
    except (OSError, ValueError, OverflowError) as error:  # huge pages, more than there are addresses
        raise InvalidArgument(
            f"the memfd cannot be mapped ({error}); use an ordinary one, or less of it"
        ) from error
