"""Receives clients' files: copies, checks and digests them. I/O blocks."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from honed.protocol.errors import HonedError, InvalidArgument, PermissionDenied, ResourceExhausted

_CHUNK = 4 << 20  # Bytes copied at once
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BAD_NAME = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.EILSEQ}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A stored file: `name` is the client's, and its bytes are the object `sha256`."""

    name: str
    sha256: str
    nbytes: int


def receive(descriptor: int, name: str, folder: Path, limit: int) -> tuple[StoredFile, Path]:
    """Copy a client's file into `folder` under its own relative name, synced.

    `limit` is in bytes. Raises InvalidArgument if it is no readable regular file, or its name leads out of
    the folder; ResourceExhausted if it is too large or the disk is full.
    """
    path = folder / relative(name)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{name} is not a regular file; send the model as a file or memfd")
    if status.st_size > limit:
        raise _too_large(name, limit)
    with explain_errors(path), _make(path, name) as target:
        sha256, nbytes = _copy(descriptor, target.fileno(), name, limit)
        os.fsync(target.fileno())
    return StoredFile(name=name, sha256=sha256, nbytes=nbytes), path


def _make(path: Path, name: str) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")
    except OSError as error:
        if error.errno not in _BAD_NAME:
            raise
        raise InvalidArgument(
            f"{name[:80]!r} cannot name a file beside the others ({error.strerror}); rename it"
        ) from error


def describe(path: Path, name: str) -> StoredFile:
    """Sync a file that the service created, and return its description."""
    with explain_errors(path), path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(name=name, sha256=digest, nbytes=os.fstat(file.fileno()).st_size)


def relative(name: str) -> PurePosixPath:
    """Return a client's file name as a relative path; raise InvalidArgument if it leads out of a folder."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or len(name) > 1024:
        raise InvalidArgument(f"{name[:80]!r} is not a relative file name without '..'; rename the file")
    return path


def _too_large(name: str, limit: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"{name} is larger than the {limit} bytes allowed; raise max_model_bytes in the configuration"
    )


def _copy(source: int, target: int, name: str, limit: int) -> tuple[str, int]:
    """Copy with pread, because the file's position belongs to the client too."""
    digest, done = hashlib.sha256(), 0
    while True:
        try:
            chunk = os.pread(source, _CHUNK, done)
        except OSError as error:
            raise InvalidArgument(f"{name} cannot be read ({error.strerror}); open it for reading") from error
        if not chunk:
            return digest.hexdigest(), done
        done += len(chunk)
        if done > limit:
            raise _too_large(name, limit)  # The file has grown since it was checked
        digest.update(chunk)
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Convert operating-system errors to ResourceExhausted or PermissionDenied."""
    try:
        yield
    except HonedError:
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ResourceExhausted(
                f"there is no room left at {path}; free some disk space and try again"
            ) from error
        raise PermissionDenied(
            f"{error.filename or path} cannot be used ({error.strerror}); check who owns the state folder"
        ) from error
