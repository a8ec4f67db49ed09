"""One service per state folder and per socket: locks that end with the process."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from honed.protocol.errors import AlreadyExists, PermissionDenied


def acquire(path: Path, what: str, folder_mode: int = 0o700) -> int:
    """Lock the file `path` (made if missing) and return its descriptor; the lock lasts until it is closed.

    A folder that is missing is made with `folder_mode`, whatever the umask is. Raises AlreadyExists where
    another process holds it; `what` says in the message what is in use.
    """
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(folder_mode)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise PermissionDenied(
            f"{path} cannot be opened ({error.strerror}); run as the user that owns {path.parent}, "
            "or choose other places with --socket and --state-dir"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AlreadyExists(f"{path} is there and is no regular file; remove it")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise AlreadyExists(
            f"another honed (process {holder or 'unknown'}) uses {what}; stop it, or choose other places "
            "with --socket and --state-dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
