"""Opens the records' file: creates it, brings it to this format, or sets a damaged one aside."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from honed.machine.files import sync_folder
from honed.protocol.errors import (
    HonedError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)

from . import sql

logger = logging.getLogger(__name__)

_DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DENIED: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})
_SIDE_FILES: Final = ("", "-wal", "-shm")


class _Damaged(Exception):
    """Raised when the file is no sound database; the message is SQLite's finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open database; `lock` is held as long as it is open. `notes` are sentences the user should see."""

    connection: sqlite3.Connection
    lock: int
    notes: tuple[str, ...]


def open_database(path: Path, *, busy_s: float) -> Opened:
    """Open the database at `path`, checked and in this format.

    Waits up to `busy_s` seconds for another process's write. Raises InvalidArgument where the file is a newer
    honed's or another program's, Unavailable where it is busy, or damaged while another process has it open;
    PermissionDenied and ResourceExhausted for the disk.
    """
    with explain_errors(path):
        fresh = not path.exists()
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            notes: tuple[str, ...] = ()
            try:
                # A write-ahead log is left by a process that was killed, or there is one at work.
                connection = _open_sound(path, busy_s, thorough=_size(Path(f"{path}-wal")) > 0)
            except _Damaged:
                notes = _replace(path, lock, busy_s)
                connection = _open_sound(path, busy_s, thorough=False)
            if fresh or notes:
                sync_folder(path.parent)
        except BaseException:
            os.close(lock)
            raise
        return Opened(connection=connection, lock=lock, notes=notes)


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn errors of the database and the disk into one sentence each."""
    try:
        yield
    except sqlite3.Error as error:
        raise _sentence(path, error) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceExhausted(
                f"there is no room left for records {path}; free some disk space"
            ) from error
        raise PermissionDenied(
            f"records {path} cannot be opened ({error.strerror}); check its folder and who owns it"
        ) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit everything in the block or nothing; it is durable when the block has ended."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # The first error is the one to report
            connection.execute("ROLLBACK")
        raise


def _open_sound(path: Path, busy_s: float, *, thorough: bool) -> sqlite3.Connection:
    """Open a database that passes its check, in this format; raise _Damaged where it does not pass."""
    try:
        connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None)
        try:
            _check_kind(path, connection)  # Precedes any change of the file
            _configure(connection)
            _check(connection, thorough=thorough)
            _migrate(connection)
        except BaseException:
            connection.close()
            raise
    except sqlite3.DatabaseError as error:
        if _primary(error) in _DAMAGE:
            raise _Damaged(str(error)) from error
        raise
    return connection


def _configure(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # Committed data survives a power cut
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")


def _check(connection: sqlite3.Connection, *, thorough: bool) -> None:
    pragma = "integrity_check" if thorough else "quick_check"
    found = connection.execute(f"PRAGMA {pragma}(1)").fetchone()[0]
    if found != "ok":
        raise _Damaged(found)


def _migrate(connection: sqlite3.Connection) -> None:
    if _version(connection) == len(sql.MIGRATIONS):
        return
    with transaction(connection):  # Another process may have done it meanwhile, so the version is read again
        for number, statements in enumerate(sql.MIGRATIONS[_version(connection) :], _version(connection) + 1):
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
        connection.execute(f"PRAGMA application_id = {sql.APPLICATION_ID}")


def _check_kind(path: Path, connection: sqlite3.Connection) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]
    if application != sql.APPLICATION_ID and (application or tables):
        raise InvalidArgument(f"{path} is another program's database; give honed a path of its own")
    version = _version(connection)
    if version > len(sql.MIGRATIONS):
        raise InvalidArgument(
            f"records {path} are of format {version} and this honed knows {len(sql.MIGRATIONS)}; "
            "install the newer honed again, or move the file away to begin anew"
        )


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _replace(path: Path, lock: int, busy_s: float) -> tuple[str, ...]:
    """Set the damaged file aside, unless another process has it open or has replaced it meanwhile."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Unavailable(
            f"records {path} are damaged and another process has them open; stop it and try again"
        ) from error
    try:
        _open_sound(path, busy_s, thorough=True).close()
    except _Damaged as damage:
        aside = _free_name(path)
        for suffix in _SIDE_FILES:
            with suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{aside}{suffix}")
        note = f"records {path} were damaged ({damage}) and begin anew; the old ones are kept in {aside}"
        logger.warning("%s", note)
        return (note,)
    finally:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return ()


def _free_name(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (
        path.with_name(f"{path.name}.damaged-{stamp}{more}")
        for more in ("", *map("-{}".format, range(2, 1000)))
    )
    return next(name for name in names if not name.exists())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _no_room(path: Path) -> bool:
    """Return whether the disk is nearly full, when SQLite may also fail to make its files longer."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < 1 << 20


def _primary(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code; 0 where Python itself refused."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _sentence(path: Path, error: sqlite3.Error) -> HonedError:
    code = _primary(error)
    if code in _BUSY:
        return Unavailable(f"records {path} are being written by another process; try again")
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _no_room(path)):
        return ResourceExhausted(
            f"records {path} cannot be written ({error}); free some disk space and try again"
        )
    if code in _DENIED:
        return PermissionDenied(
            f"records {path} cannot be opened or written ({error}); check who owns the folder"
        )
    if code in _DAMAGE:
        return Unavailable(f"records {path} are damaged ({error}); open them again to have them set aside")
    if code == sqlite3.SQLITE_IOERR:
        return Unavailable(f"records {path} cannot be read or written ({error}); check the disk")
    return InvalidArgument(f"the records refused this ({error}); give values they can hold")
