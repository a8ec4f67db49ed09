"""Fetches files by HTTP from an untrusted server, bounded in bytes and time, and by their tags.

urllib alone would wait for ever on headers that arrive a byte at a time, follow any redirection, and read all
of a redirection's body.
"""

from __future__ import annotations

import functools
import http.client
import re
import socket
import ssl
import string
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

from honed.protocol.errors import InvalidArgument, NotFound, Unavailable

WHOLE_SECONDS: Final = 300.0  # Time limit of one file
_CHUNK: Final = 1 << 16
_MOST_SAID: Final = 120  # Letters of a server's text in a message
_STEP_SECONDS: Final = 20.0  # Time limit without any data
_REDIRECTIONS: Final = 3
_SETTLED: Final = 60.0  # Seconds since a change, after which a date or an nginx's ETag cannot hide another
_GONE: Final = frozenset({403, 404, 410})  # S3 answers 403 for a missing file to those who may not list
_MOVED: Final = frozenset({301, 302, 303, 307, 308})
_UNCHANGED: Final = 304
_ETAG: Final = re.compile(r'(W/)?"[!#-~]{0,200}"')
_DATE: Final = re.compile(r"[A-Za-z0-9,: +-]{1,40}")


@dataclass(frozen=True, slots=True)
class FetchResult:
    """A file, None if it still has the requested `tag`; and its present tag.

    A file with the tag "" is read whole each time.
    """

    data: bytes | None
    tag: str = ""


def read_bounded(read: Callable[[int], bytes], most: int, name: str) -> bytes:
    """Return all bytes of `read`; raise InvalidArgument beyond `most` bytes, Unavailable past the time."""
    end = time.monotonic() + WHOLE_SECONDS
    parts, size = [], 0
    while part := read(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > most:
            raise InvalidArgument(f"{name} is larger than {most} bytes, and was left")
        if time.monotonic() > end:
            raise Unavailable(f"{name} took more than {WHOLE_SECONDS:.0f} s, and was left")
    return b"".join(parts)


def printable(what: object) -> str:
    """Return what a server sent, made fit for a log."""
    return "".join(c if c.isprintable() else "?" for c in str(what)[:_MOST_SAID])


@dataclass(frozen=True, slots=True)
class _Moved:
    address: str


def get(address: str, most: int, tag: str = "") -> FetchResult:
    """Return the file at an address.

    Raises NotFound, Unavailable, or InvalidArgument for a file of more than `most` bytes, or one that is at
    another server.
    """
    with _Alarm(WHOLE_SECONDS) as alarm:
        for _ in range(_REDIRECTIONS + 1):
            answer = _once(address, most, tag, alarm)
            if isinstance(answer, FetchResult):
                return answer
            address = _follow_redirect(address, answer.address)
    raise InvalidArgument(f"{address} leads on and on")


def _once(address: str, most: int, tag: str, alarm: _Alarm) -> FetchResult | _Moved:
    condition = {"If-None-Match" if _ETAG.fullmatch(tag) else "If-Modified-Since": tag} if tag else {}
    request = urllib.request.Request(address, headers=condition)
    try:
        with _opener(alarm).open(request, timeout=_STEP_SECONDS) as answer:
            data = read_bounded(answer.read1, most, address)
            alarm.check(address)  # A connection ended by the alarm looks like the end of a file
            return FetchResult(data, _tag(answer.headers))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _UNCHANGED and tag:
            return FetchResult(None, tag)
        if error.code in _MOVED and (location := error.headers.get("Location")):
            return _Moved(location)
        if error.code in _GONE:
            raise NotFound(f"there is no {address} ({error.code})") from None
        raise Unavailable(f"{address} answers {error.code} {printable(error.reason)}") from None
    except (OSError, HTTPException, ValueError) as error:
        alarm.check(address)
        why = getattr(error, "reason", None) or error
        raise Unavailable(f"{address} cannot be read ({printable(why)})") from error


def _follow_redirect(address: str, location: str) -> str:
    """Return the target of a redirection; raise InvalidArgument for another server.

    Only the port and scheme may change, from HTTP to HTTPS on their default ports.
    """
    try:
        led = quote(urljoin(address, location), encoding="iso-8859-1", safe=string.punctuation)
        before, after = urlsplit(address), urlsplit(led)
        same = before.hostname == after.hostname and (
            (before.scheme, before.port) == (after.scheme, after.port)
            or (before.scheme, before.port or 80, after.scheme, after.port or 443)
            == ("http", 80, "https", 443)
        )
    except ValueError as error:
        raise InvalidArgument(f"{address} leads to what is no address ({printable(error)})") from None
    if not same:
        raise InvalidArgument(
            f"{address} leads to {printable(led)}, which is another server; give its address if that is right"
        )
    return led


def _tag(headers: Message) -> str:
    """Return the tag for the next request: an ETag, or else the time of the change; "" if neither is safe."""
    modified, etag = str(headers.get("Last-Modified", "")), str(headers.get("ETag", "")).strip()
    if modified and not (_DATE.fullmatch(modified) and _is_settled(headers.get("Date", ""), modified)):
        return ""
    return etag if _ETAG.fullmatch(etag) else modified


def _is_settled(now: str, modified: str) -> bool:
    try:
        since = parsedate_to_datetime(now) - parsedate_to_datetime(modified)
    except (ValueError, TypeError, OverflowError):
        return False
    return since.total_seconds() >= _SETTLED


class _Alarm:
    """A timer that ends the connections of one file when its time is up, whatever they wait for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True

    def __enter__(self) -> _Alarm:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets.clear()

    def watch(self, connected: socket.socket) -> None:
        """End this connection, too. A duplicate is kept, because TLS replaces the socket."""
        with self._lock:
            self._sockets.append(connected.dup())
        if time.monotonic() >= self._end:
            self._ring()

    def check(self, address: str) -> None:
        if time.monotonic() >= self._end:
            raise Unavailable(f"{address} took more than {self._seconds:.0f} s, and was left")

    def _ring(self) -> None:
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


class _Connection(http.client.HTTPConnection):
    alarm: _Alarm

    def connect(self) -> None:
        super().connect()
        self.alarm.watch(self.sock)


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """A connection that _Connection makes, and that then speaks TLS."""


def _watch(kind: type[_Connection], alarm: _Alarm, host: str, **others: Any) -> _Connection:
    made = kind(host, **others)
    made.alarm = alarm
    return made


class _Http(urllib.request.HTTPHandler):
    def __init__(self, alarm: _Alarm) -> None:
        super().__init__()
        self._alarm = alarm

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(functools.partial(_watch, _Connection, self._alarm), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, alarm: _Alarm) -> None:
        super().__init__()
        self._alarm = alarm

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        connection = functools.partial(_watch, _SecureConnection, self._alarm, context=_checking())
        return self.do_open(connection, req)


@functools.cache
def _checking() -> ssl.SSLContext:
    """Return a context with all certificates of the system; cached, since reading them is slow."""
    return ssl.create_default_context()


def _opener(alarm: _Alarm) -> urllib.request.OpenerDirector:
    """Return an opener for HTTP and HTTPS alone, which follows no redirections."""
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _Http(alarm),
        _Https(alarm),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        made.add_handler(handler)
    return made
