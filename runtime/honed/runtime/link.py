"""One connection to the service, shared by threads: each waits for its own answer."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from . import endpoint, wire
from .arrivals import Arrivals, close_all
from .errors import DeadlineExceeded, HonedError
from .protocol import error_from_map

_CHUNK = 256 << 10  # bytes read at once
_MAX_DESCRIPTORS = 64  # of one answer


class Waiting:
    """An unanswered request."""

    __slots__ = ("descriptors", "error", "msgid", "news", "response")

    def __init__(self, msgid: int) -> None:
        self.msgid = msgid
        self.news: deque[dict[str, Any]] = deque()  # progress not yet shown
        self.response: wire.Response | None = None
        self.descriptors: list[int] = []  # that came with the response; whoever takes it closes them
        self.error: HonedError | None = None

    @property
    def woken(self) -> bool:
        """Whether there is something for the waiting thread."""
        return bool(self.news) or self.response is not None or self.error is not None


class Link:
    """A connected socket. Whichever thread waits reads for all, so that one thread alone pays nothing."""

    def __init__(self, path: str, send_timeout: float | None) -> None:
        """Raises Unavailable where no service answers. `send_timeout` in seconds; None: no limit."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(send_timeout)
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise endpoint.cannot_connect(path, error) from error
        self._decoder = wire.Decoder(wire.FrameLimits(max_bytes=1 << 30))
        self._arrivals = Arrivals()  # of whoever reads
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._reading = False
        self._waiting: dict[int, Waiting] = {}
        self._next_msgid = 0
        self._broken: HonedError | None = None

    def usable(self) -> bool:
        """Whether the connection is up, as far as can be told without sending."""
        with self._changed:
            if self._broken is not None or self._reading or self._waiting:
                return self._broken is None
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            return not poller.poll(0)  # nobody waits, so that news can only be the end

    def send(self, method: str, params: dict[str, Any], descriptors: Sequence[int]) -> Waiting:
        """Send a request; raises Unavailable where the service is gone: it has then not run."""
        with self._changed:
            self._next_msgid = (self._next_msgid + 1) & wire.MAX_MSGID
            waiting = Waiting(self._next_msgid)
        frame = wire.encode(wire.Request(msgid=waiting.msgid, method=method, params=params))
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._waiting[waiting.msgid] = waiting
        try:
            self._write(frame, descriptors)
        except BaseException as error:
            # Part of the frame may be out: nothing more can be said on this connection.
            lost = endpoint.connection_lost()
            self._fail(lost)
            if isinstance(error, OSError):
                raise lost from error
            raise
        return waiting

    def wait(self, waiting: Waiting, deadline: float | None) -> dict[str, Any] | wire.Response:
        """The next progress of the request, or its response; raises its error.

        `deadline` is in time.monotonic's seconds. When it passes, or on Ctrl-C, the request is cancelled.
        """
        try:
            while True:
                with self._changed:
                    while self._reading and not waiting.woken:
                        self._changed.wait(_left(deadline))
                    if waiting.woken:
                        return self._news(waiting)
                    self._reading = True
                self._read_for_all(deadline)
        except (DeadlineExceeded, KeyboardInterrupt):
            self.cancel(waiting)
            raise

    def close(self) -> None:
        """End the connection; waiting threads get Unavailable."""
        self._fail(endpoint.connection_lost())
        with self._sending:
            self._socket.close()

    def _news(self, waiting: Waiting) -> dict[str, Any] | wire.Response:
        if waiting.news:
            return waiting.news.popleft()
        self._waiting.pop(waiting.msgid, None)
        if waiting.response is None:
            raise waiting.error or endpoint.connection_lost()
        if waiting.response.error is not None:
            raise error_from_map(waiting.response.error)
        return waiting.response

    def _write(self, frame: bytes, descriptors: Sequence[int]) -> None:
        with self._sending:
            view = memoryview(frame)
            sent = socket.send_fds(self._socket, [view], descriptors) if descriptors else 0
            self._socket.sendall(view[sent:])

    def _read_for_all(self, deadline: float | None) -> None:
        try:
            timeout = _left(deadline)
            try:
                for message, descriptors in self._receive(timeout):
                    self._deliver(message, descriptors)
            except OSError:
                self._fail(endpoint.connection_lost())
            except wire.PeerFault as fault:
                self._fail(fault.error)
            except BaseException:
                # Ctrl-C may have come between reading and delivering: answers could be lost.
                self._fail(endpoint.connection_lost())
                raise
        finally:
            with self._changed:
                self._reading = False
                if self._broken is not None:
                    self._arrivals.close()
                self._changed.notify_all()

    def _receive(self, timeout: float | None) -> list[tuple[wire.Message, list[int]]]:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            return []
        data, descriptors, _, _ = socket.recv_fds(
            self._socket, _CHUNK, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        self._arrivals.note(len(data), descriptors)
        if not data:
            raise ConnectionResetError
        self._decoder.feed(data)
        messages = []
        while (message := self._decoder.next_message()) is not None:
            messages.append((message, self._arrivals.take(self._decoder.buffered)))
        return messages

    def _deliver(self, message: wire.Message, descriptors: list[int]) -> None:
        match message:
            case wire.Response():
                with self._changed:
                    waiting = self._waiting.get(message.msgid)
                    if waiting is not None:  # None: it was cancelled meanwhile
                        waiting.response, waiting.descriptors = message, descriptors
                        descriptors = []
                    self._changed.notify_all()
            case wire.Notification(method="Progress", params=params):
                with self._changed:
                    waiting = self._waiting.get(params.get("msgid", -1))
                    if waiting is not None:
                        waiting.news.append(params)
                    self._changed.notify_all()
            case wire.Notification(method="Error", params=params):
                self._fail(error_from_map(params))
        close_all(descriptors)

    def _fail(self, error: HonedError) -> None:
        with self._changed:
            self._broken = self._broken or error
            for waiting in self._waiting.values():
                waiting.error = waiting.error or self._broken
            self._waiting.clear()
            if not self._reading:
                self._arrivals.close()
            self._changed.notify_all()

    def cancel(self, waiting: Waiting) -> None:
        """Give a request up; one that was answered already is left alone."""
        with self._changed:
            close_all(waiting.descriptors)
            waiting.descriptors = []
            if self._waiting.pop(waiting.msgid, None) is None or self._broken is not None:
                return
        frame = wire.encode(wire.Notification(method="Cancel", params={"msgid": waiting.msgid}))
        try:
            self._write(frame, ())
        except OSError:
            self._fail(endpoint.connection_lost())


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the service did not answer in time; give a longer timeout")
    return left
