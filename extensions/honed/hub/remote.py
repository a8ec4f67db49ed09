"""Reads and writes a hub's files in a folder, on an HTTP server, or with fsspec. Reads are bounded."""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Final, TypeVar
from urllib.parse import quote, urlsplit

from honed.machine.files import open_regular, replacing
from honed.protocol.errors import InvalidArgument, NotFound, Unavailable

from . import web
from .web import WHOLE_SECONDS, FetchResult, printable, read_bounded

T = TypeVar("T")
_PATIENCE_SECONDS: Final = 3600.0  # Time limit for all reads of one pull


class FolderMissing(Unavailable):
    """Raised when a hub's folder does not exist; the first push makes it."""


class HubStore(ABC):
    """A hub's folder. Names are relative, of letters, digits, "/", "." and "-"."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._end = time.monotonic() + _PATIENCE_SECONDS

    def read(self, name: str, most: int) -> bytes:
        """Return a file's content.

        Raises NotFound, Unavailable, or InvalidArgument for a file of more than `most` bytes.
        """
        data = self.look(name, most).data
        assert data is not None, "there is no tag that it could be unchanged by"
        return data

    @abstractmethod
    def look(self, name: str, most: int, tag: str = "") -> FetchResult:
        """Read a file, unless it still has this tag; raise what `read` raises."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file atomically; raises Unavailable."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it exists; raises Unavailable."""

    def _hurry(self) -> None:
        """Raise Unavailable if the reads together took too long."""
        if time.monotonic() > self._end:
            raise Unavailable(f"{self.url} took more than {_PATIENCE_SECONDS / 60:.0f} min, and was left")


def store(url: str) -> HubStore:
    """Return the store at a URL or the path of a folder; raise InvalidArgument if it is neither."""
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return _Web(url.rstrip("/"))
    if scheme in ("", "file"):
        path = Path(urlsplit(url).path if scheme else url)
        if not path.is_absolute():
            raise InvalidArgument(f"hub {url!r} is no absolute path; give one, or a URL")
        return _Folder(path)
    return _Other(url.rstrip("/"))


class _Folder(HubStore):
    """A hub in a folder. All who write there are untrusted: links, FIFOs and devices are not read."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def look(self, name: str, most: int, tag: str = "") -> FetchResult:
        try:
            with open_regular(self._at(name)) as file:
                return FetchResult(read_bounded(file.read, most, name))
        except (FileNotFoundError, NotADirectoryError):
            if not self._path.is_dir():
                raise FolderMissing(f"there is no folder {self.url}; make or mount it") from None
            raise NotFound(f"{self.url} has no {name}") from None
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.EINVAL, errno.ENXIO):
                raise InvalidArgument(f"{self.url}/{name} is no file, and was left") from None
            raise Unavailable(f"{self.url}/{name} cannot be read ({error.strerror})") from error

    def write(self, name: str, data: bytes) -> None:
        path = self._at(name)
        try:
            _readable(path.parent)
            with replacing(path) as file:
                os.fchmod(file.fileno(), 0o644)  # A web server reads it
                file.write(data)
        except OSError as error:
            raise Unavailable(f"{path} cannot be written ({error.strerror})") from error

    def remove(self, name: str) -> None:
        path = self._at(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"{path} cannot be removed ({error.strerror})") from error

    def _at(self, name: str) -> Path:
        """Return a file's path; raise InvalidArgument if a link below the hub's folder leads elsewhere."""
        path = Path(os.path.realpath(self._path)) / name
        if os.path.realpath(path) != str(path):
            raise InvalidArgument(f"{self.url}/{name} is a link or behind one, and was left")
        return path


class _Web(HubStore):
    def look(self, name: str, most: int, tag: str = "") -> FetchResult:
        self._hurry()
        try:
            return web.get(f"{self.url}/{quote(name)}", most, tag)
        except NotFound:
            raise NotFound(f"{self.url} has no {name}") from None

    def write(self, name: str, data: bytes) -> None:
        raise InvalidArgument(f"nothing can be pushed to {self.url}; push to the folder that it serves")

    def remove(self, name: str) -> None:
        raise InvalidArgument(f"nothing can be removed at {self.url}; do so in the folder that it serves")


class _Other(HubStore):
    """A hub on S3 or another file system of fsspec's."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        import fsspec

        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"hub {url!r} cannot be read: {error}") from error

    def look(self, name: str, most: int, tag: str = "") -> FetchResult:
        self._hurry()
        path = f"{self._root}/{name}"

        def work() -> FetchResult:
            known = self._files.info(path)
            now = str(known.get("ETag") or known.get("etag") or "")  # S3 and others have ETags
            if now and now == tag:
                return FetchResult(None, now)
            with self._files.open(path, "rb") as file:
                return FetchResult(read_bounded(file.read, most, name), now)

        return self._reach(name, work)

    def write(self, name: str, data: bytes) -> None:
        self._reach(name, lambda: self._files.pipe_file(f"{self._root}/{name}", data))

    def remove(self, name: str) -> None:
        try:
            self._reach(name, lambda: self._files.rm_file(f"{self._root}/{name}"))
        except NotFound:
            return

    def _reach(self, name: str, work: Callable[[], T]) -> T:
        try:
            return _in_time(work)
        except _TooLate:
            raise Unavailable(
                f"{self.url}/{name} took more than {WHOLE_SECONDS:.0f} s, and was left"
            ) from None
        except FileNotFoundError:
            raise NotFound(f"{self.url} has no {name}") from None
        except (InvalidArgument, Unavailable):
            raise
        except Exception as error:  # File systems of fsspec raise what their libraries do
            raise Unavailable(f"{self.url}/{name}: {type(error).__name__}: {printable(error)}") from error


class _TooLate(Exception):
    pass


def _in_time(work: Callable[[], T]) -> T:
    """Return what `work` returns, within a time limit.

    Libraries wait as long as a server sends a byte now and then, so `work` has its own thread, which is
    abandoned when time is up. Raises _TooLate, and what `work` raises.
    """
    given: Future[T] = Future()

    def run() -> None:
        try:
            given.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            given.set_exception(error)

    Thread(target=run, daemon=True).start()
    if not wait([given], WHOLE_SECONDS).done:
        raise _TooLate
    return given.result()


def _readable(folder: Path) -> None:
    """Create a folder that a web server can read, whatever this user's umask."""
    if not folder.is_dir():
        _readable(folder.parent)
        folder.mkdir(exist_ok=True)
        os.chmod(folder, 0o755)
