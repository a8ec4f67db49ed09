"""Files that are either whole or not there: write to a temporary name, fsync, rename, fsync the folder."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import InvalidArgument, PermissionDenied, ResourceExhausted


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file, readable too, that takes the place of `path` when the block ends without an error.

    Until then `path` stays what it was, also after a crash or a power cut. Raises ResourceExhausted where
    the disk is full, PermissionDenied or InvalidArgument where the file cannot be made.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise _explained(path, error) from error


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceExhausted(f"there is no room left to write {path}; free some disk space and try again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(f"{path} cannot be written ({error.strerror}); check who owns its folder")
    return InvalidArgument(f"{path} cannot be written ({error.strerror}); check that its folder exists")
