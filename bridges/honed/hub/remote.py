"""Where a hub's files lie: a folder, an HTTP server, or what fsspec knows. Reads are bounded."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, urlsplit

from honed.machine.files import replacing
from honed.protocol.errors import InvalidArgument, NotFound, Unavailable

T = TypeVar("T")
_CHUNK: Final = 1 << 16
_STEP_SECONDS: Final = 20.0  # that nothing may come
_WHOLE_SECONDS: Final = 300.0  # of one file


class Store(ABC):
    """A hub's folder. Names are relative, of letters, digits, "/", "." and "-"."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """A file. Raises NotFound, Unavailable, or InvalidArgument for one of more than `most` bytes."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Put a file there, or another in its place, at once; raises Unavailable."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, where it is there; raises Unavailable."""


def store(url: str) -> Store:
    """By its URL, or the path of a folder; raises InvalidArgument where nothing can be read by it."""
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return _Web(url.rstrip("/"))
    if scheme in ("", "file"):
        path = Path(urlsplit(url).path if scheme else url)
        if not path.is_absolute():
            raise InvalidArgument(f"hub {url!r} is no absolute path; give one, or a URL")
        return _Folder(path)
    return _Other(url.rstrip("/"))


class _Folder(Store):
    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def read(self, name: str, most: int) -> bytes:
        try:
            with (self._path / name).open("rb") as file:
                return _bounded(file.read, most, name)
        except (FileNotFoundError, NotADirectoryError):
            if not self._path.is_dir():
                raise Unavailable(f"there is no folder {self.url}; make or mount it") from None
            raise NotFound(f"{self.url} has no {name}") from None
        except OSError as error:
            raise Unavailable(f"{self.url}/{name} cannot be read ({error.strerror})") from error

    def write(self, name: str, data: bytes) -> None:
        path = self._path / name
        try:
            _readable(path.parent)
            with replacing(path) as file:
                file.write(data)
            os.chmod(path, 0o644)  # a web server reads it
        except OSError as error:
            raise Unavailable(f"{path} cannot be written ({error.strerror})") from error

    def remove(self, name: str) -> None:
        try:
            (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"{self._path / name} cannot be removed ({error.strerror})") from error


class _Web(Store):
    def read(self, name: str, most: int) -> bytes:
        address = f"{self.url}/{quote(name)}"
        try:
            with urllib.request.urlopen(address, timeout=_STEP_SECONDS) as answer:
                if urlsplit(answer.url).scheme not in ("http", "https"):
                    raise InvalidArgument(f"{address} leads to {answer.url}, which is no web address")
                return _bounded(answer.read1, most, name)
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                raise NotFound(f"{self.url} has no {name}") from None
            raise Unavailable(f"{address} answers {error.code} {error.reason}") from error
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise Unavailable(f"{address} cannot be read ({why})") from error

    def write(self, name: str, data: bytes) -> None:
        raise InvalidArgument(f"nothing can be pushed to {self.url}; push to the folder that it serves")

    def remove(self, name: str) -> None:
        raise InvalidArgument(f"nothing can be removed at {self.url}; do so in the folder that it serves")


class _Other(Store):
    """S3 and whatever else fsspec has a file system for."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        import fsspec

        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"hub {url!r} cannot be read: {error}") from error

    def read(self, name: str, most: int) -> bytes:
        def work() -> bytes:
            with self._files.open(f"{self._root}/{name}", "rb") as file:
                return _bounded(file.read, most, name)

        return self._told(name, work)

    def write(self, name: str, data: bytes) -> None:
        self._told(name, lambda: self._files.pipe_file(f"{self._root}/{name}", data))

    def remove(self, name: str) -> None:
        try:
            self._told(name, lambda: self._files.rm_file(f"{self._root}/{name}"))
        except NotFound:
            return

    def _told(self, name: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except FileNotFoundError:
            raise NotFound(f"{self.url} has no {name}") from None
        except InvalidArgument:
            raise
        except Exception as error:  # file systems of fsspec raise what their libraries do
            raise Unavailable(f"{self.url}/{name}: {type(error).__name__}: {error}") from error


def _readable(folder: Path) -> None:
    """Make a folder that a web server can read, whatever this user's files are like."""
    if not folder.is_dir():
        _readable(folder.parent)
        folder.mkdir(exist_ok=True)
        os.chmod(folder, 0o755)


def _bounded(read: Callable[[int], bytes], most: int, name: str) -> bytes:
    """All there is; raises InvalidArgument beyond `most`, Unavailable where it takes too long."""
    end = time.monotonic() + _WHOLE_SECONDS
    parts, size = [], 0
    while part := read(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > most:
            raise InvalidArgument(f"{name} is larger than {most} bytes, and was left")
        if time.monotonic() > end:
            raise Unavailable(f"{name} took more than {_WHOLE_SECONDS:.0f} s, and was left")
    return b"".join(parts)
