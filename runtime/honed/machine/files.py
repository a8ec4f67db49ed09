"""Writes files atomically, reads files that may be traps, and reads those of /proc and /sys.

Writing: to a temporary name, fsync, rename, fsync the folder. Reading: if a folder, a FIFO or a device is in
the file's place, that is an error at once.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from honed.protocol.errors import InvalidArgument, PermissionDenied, ResourceExhausted

_MAX_SYSTEM_BYTES = 64 << 10
MAX_CONFIG_BYTES = 256 << 10
_MAX_DOTS = 200  # Limit for a line of TOML: the parser's time for a key is quadratic in its parts


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces `path` when the block ends without an error; it is readable, too.

    Until then `path` keeps its contents, also after a crash or a power cut. Raises ResourceExhausted if the
    disk is full, PermissionDenied or InvalidArgument if the file cannot be created.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
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
        raise _explain(path, error) from error


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without ever waiting; raise OSError, with EINVAL for other files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """Return all bytes of a regular file.

    Raises OSError as `open_regular` does, and EFBIG beyond `limit` bytes.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data


def read_toml(file: Path) -> tuple[dict[str, Any], str]:
    """Return the contents of a configuration file, and its text.

    Raises FileNotFoundError, or InvalidArgument, which names the file and what is wrong.
    """
    import tomllib  # Most programs read no such file

    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable_config(file, error) from error
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidArgument(
            f"configuration file {file} is larger than {MAX_CONFIG_BYTES} bytes; shorten it"
        )
    try:
        text = data.decode()
        for number, line in enumerate(text.split("\n"), 1):
            if line.count(".") > _MAX_DOTS:
                raise InvalidArgument(f"{file}:{number} has more than {_MAX_DOTS} dots; correct that line")
        return tomllib.loads(text), text
    except (ValueError, RecursionError) as error:  # UTF-8's and TOML's; nested without end
        raise InvalidArgument(f"configuration file {file} is not TOML: {error}; correct that line") from error


def unreadable_config(file: Path, error: OSError) -> InvalidArgument:
    """Return the error to raise for a configuration file that cannot be read."""
    return InvalidArgument(
        f"configuration file {file} cannot be read ({error.strerror}); check its permissions"
    )


def put_aside(path: Path) -> str:
    """Rename an unusable file to `.damaged`, for users to look at; return a few words on where it is."""
    aside = path.with_name(path.name + ".damaged")
    try:
        path.replace(aside)
    except OSError as error:
        return f"it cannot be moved away ({error.strerror})"
    return f"it is now {aside}"


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceExhausted(f"there is no room left to write {path}; free some disk space and try again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(f"{path} cannot be written ({error.strerror}); check who owns its folder")
    return InvalidArgument(f"{path} cannot be written ({error.strerror}); check that its folder exists")


def system_text(file: Path) -> str | None:
    """Return the text of a small file of /proc or /sys, without surrounding white space.

    Returns None for a file that cannot be read, whatever the reason (missing, forbidden, driver suspended,
    device unplugged meanwhile): this machine does not show that signal now.
    """
    try:
        with file.open("rb") as stream:
            return stream.read(_MAX_SYSTEM_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


def system_number(file: Path) -> int | None:
    """Return the whole number in a file of /proc or /sys; None if it cannot be read."""
    text = system_text(file)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def entries(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted by name; none if the folder cannot be read."""
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except OSError:
        return []


def gpu_hz(root: Path = Path("/")) -> int | None:
    """Return the present clock of the first GPU that devfreq scales, in Hz; None if it cannot be read."""
    return next((system_number(folder / "cur_freq") for folder in gpu_clocks(root)), None)


def gpu_clocks(root: Path) -> list[Path]:
    """Return devfreq's folders of GPUs, whose clocks it scales; `root` is the file system's root."""
    folders = entries(root / "sys/class/devfreq")
    return [folder for folder in folders if "gpu" in folder.name or "mali" in folder.name]
