"""One end of a connection: bytes in and events out, calls in and bytes out, and how a socket moves them.

The service, its workers and every client use it. `Peer` does no I/O: the owner of the socket passes input to
`Peer.receive`, reads `next_event` until that is None, and writes what `to_send` returns. `read_socket` and
`write_socket` do that for a socket, blocking or not. `aiolink` is apart, as children need no asyncio.
"""

from __future__ import annotations

import array
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .decoder import FrameDecoder
from .errors import HonedError, Internal, InvalidArgument, ResourceExhausted, error_from_map, error_to_map
from .strict import Map
from .wire import (
    MAX_MSGID,
    DescriptorQueue,
    FrameLimits,
    InvalidMessage,
    Message,
    Notification,
    ProtocolError,
    Request,
    Response,
    close_all,
    encode,
    encode_parts,
)

MAX_DESCRIPTORS: Final = 32  # Descriptors of one message
MAX_PENDING_DESCRIPTORS: Final = 64  # Descriptors received with messages that are not whole yet
_CHUNK = 64 << 10  # Bytes of one read: a larger buffer would be mapped for each read
_ANCILLARY = socket.CMSG_LEN(MAX_PENDING_DESCRIPTORS * array.array("i").itemsize)
# Plain numbers: an operation on the enumerations of `socket` takes as long as a read.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_log = logging.getLogger(__name__)
Progress = Callable[[Map], None]  # Called with the Progress maps of a call in flight


@dataclass(slots=True)
class RequestReceived:
    """A request from the peer, which wants an answer; the receiver closes the descriptors."""

    msgid: int
    method: str
    params: Map
    descriptors: list[int]


@dataclass(slots=True)
class ResponseReceived:
    """The answer to a call of this end; the receiver closes the descriptors."""

    msgid: int
    error: HonedError | None
    result: Any
    descriptors: list[int]


@dataclass(slots=True)
class NotificationReceived:
    """A notification from the peer, which wants no answer."""

    method: str
    params: Map


Event = RequestReceived | ResponseReceived | NotificationReceived
_WITH_DESCRIPTORS: Final = frozenset({RequestReceived, ResponseReceived})


@dataclass(slots=True)
class _Frame:
    """The unsent bytes of a message; its descriptors are sent with the first byte."""

    parts: deque[bytes | memoryview]
    descriptors: tuple[int, ...]
    own: bool  # The descriptors are closed after sending
    call: int | None = None  # The number of the call that the message is
    begun: bool = False


class Peer:
    """The state of one end.

    It is not thread-safe, except that one thread may receive while another sends, if `call` and `cancel`
    never run during `next_event`.
    """

    def __init__(
        self,
        *,
        serves: bool,
        receiving: FrameLimits,
        sending: FrameLimits,
        large: int | None = None,
    ) -> None:
        """Set up one end of a connection; `serves`: it accepts requests.

        `large` is that of `FrameDecoder`.
        """
        self._serves = serves
        self._sending = sending
        self._decoder = FrameDecoder(receiving, large=large)
        self._arrivals = DescriptorQueue()
        self._unanswered: dict[int, int] = {}  # Bytes of the peer's unanswered requests, by msgid
        self._unanswered_bytes = 0  # Sum of these
        self._calls: set[int] = set()  # Unanswered calls of this end
        self._given_up: set[int] = set()  # Cancelled calls whose answers are still to come
        self._last_msgid = 0
        self._frames: deque[_Frame] = deque()
        self.unsent_bytes = 0
        self.unsent_descriptors = 0

    @property
    def buffered(self) -> int:
        """The number of bytes received that are not yet part of an event."""
        return self._decoder.buffered

    @property
    def unanswered(self) -> int:
        """The number of requests of the peer that are unanswered."""
        return len(self._unanswered)

    @property
    def held(self) -> int:
        """The number of bytes of messages in memory: incomplete, unanswered, and unsent."""
        return self._decoder.buffered + self._unanswered_bytes + self.unsent_bytes

    def receive(self, data: bytes, descriptors: list[int], *, truncated: bool = False) -> None:
        """Process the bytes and descriptors of one read; the peer closes descriptors that no event has.

        `truncated`: the kernel dropped descriptors. Raises ProtocolError if there are too many.
        """
        if descriptors or self._arrivals.held:
            self._arrivals.note(len(data), descriptors)
        if truncated or (descriptors and len(self._arrivals) > MAX_PENDING_DESCRIPTORS):
            raise ProtocolError(
                ResourceExhausted(
                    f"too many descriptors came with one message; send at most {MAX_DESCRIPTORS}"
                )
            )
        self._decoder.feed(data)

    def next_event(self) -> Event | None:
        """Return the next event, or None if more bytes are needed.

        Raises ProtocolError; the connection must then end. Ignores answers to cancelled calls.
        """
        while (message := self._decoder.next_message()) is not None:
            descriptors = self._arrivals.take(self._decoder.buffered) if self._arrivals.held else []
            try:
                event = self._event(message, descriptors)
            except ProtocolError:
                close_all(descriptors)
                raise
            if descriptors and type(event) not in _WITH_DESCRIPTORS:
                close_all(descriptors)
            if event is not None:
                return event
        return None

    def _event(self, message: Message, descriptors: list[int]) -> Event | None:
        if isinstance(message, Notification):
            return NotificationReceived(message.method, message.params)
        msgid = message.msgid
        if isinstance(message, Request):
            if not self._serves:
                raise ProtocolError(
                    InvalidArgument("a request came to a client; send answers and notifications")
                )
            if msgid in self._unanswered:
                raise ProtocolError(
                    InvalidArgument(f"message number {msgid} is used by an unanswered request; use another")
                )
            self._unanswered[msgid] = self._decoder.frame_bytes
            self._unanswered_bytes += self._decoder.frame_bytes
            return RequestReceived(msgid, message.method, message.params, descriptors)
        if msgid in self._given_up:
            self._given_up.remove(msgid)
            return None
        if msgid not in self._calls:
            raise ProtocolError(InvalidArgument(f"answer {msgid} is to no request; answer requests only"))
        self._calls.remove(msgid)
        error = error_from_map(message.error) if message.error is not None else None
        return ResponseReceived(msgid, error, message.result, descriptors)

    def call(self, method: str, params: Map, descriptors: Sequence[int] = ()) -> int:
        """Send a call to the peer; return the number that `ResponseReceived` will have.

        The caller keeps the descriptors, and keeps them open until the answer, or until `cancel`. Raises
        InvalidMessage and ResourceExhausted as `encode` does.
        """
        self._last_msgid = msgid = (self._last_msgid + 1) & MAX_MSGID
        parts = encode_parts(Request(msgid=msgid, method=method, params=params), self._sending)
        self._calls.add(msgid)
        self._put(parts, tuple(descriptors), own=False, call=msgid)
        return msgid

    def awaits(self, msgid: int) -> bool:
        """Return whether a call is neither answered nor cancelled."""
        return msgid in self._calls

    def cancel(self, msgid: int) -> None:
        """Cancel a call: remove it if it is unsent, else notify the peer. Ignores an answered call."""
        if msgid not in self._calls:
            return
        self._calls.remove(msgid)
        for frame in self._frames:
            if frame.call == msgid and not frame.begun:
                self._frames.remove(frame)
                self.unsent_bytes -= sum(map(len, frame.parts))
                self.unsent_descriptors -= len(frame.descriptors)
                return
        self._given_up.add(msgid)
        self.notify("Cancel", {"msgid": msgid})

    def answer(self, msgid: int, result: Any, descriptors: Sequence[int] = ()) -> None:
        """Answer a request; the descriptors are closed when they are sent."""
        self.forget(msgid)
        self._say(Response(msgid=msgid, error=None, result=result), descriptors)

    def refuse(self, msgid: int, error: HonedError) -> None:
        """Answer a request with an error."""
        self.forget(msgid)
        self._say(Response(msgid=msgid, error=error_to_map(error), result=None), ())

    def forget(self, msgid: int) -> None:
        """Drop a request that is answered now, or will not be, because the connection ends."""
        self._unanswered_bytes -= self._unanswered.pop(msgid)

    def notify(self, method: str, params: Map) -> None:
        """Send a notification, which has no answer."""
        self._say(Notification(method=method, params=params), ())

    def last_words(self, error: HonedError, msgid: int | None = None) -> None:
        """Send the reason why the connection ends, as answer to the request `msgid` if no event had it."""
        plain = error_to_map(error)
        if msgid is None or msgid in self._unanswered:
            self._say(Notification(method="Error", params=plain), ())
        else:
            self._say(Response(msgid=msgid, error=plain, result=None), ())

    def to_send(self) -> tuple[bytes | memoryview, tuple[int, ...]] | None:
        """Return the bytes to write next, and the descriptors to attach to the first of them, or None."""
        if not self._frames:
            return None
        frame = self._frames[0]
        return frame.parts[0], frame.descriptors

    def record_sent(self, nbytes: int) -> None:
        """Record that `nbytes` of these bytes, at least one, were written, and the descriptors with them."""
        frame = self._frames[0]
        frame.begun = True
        self.unsent_bytes -= nbytes
        if frame.descriptors:
            self._let_go(frame)
        if nbytes < len(frame.parts[0]):
            frame.parts[0] = memoryview(frame.parts[0])[nbytes:]
            return
        frame.parts.popleft()
        if not frame.parts:
            self._frames.popleft()

    def stop_receiving(self) -> None:
        """Stop receiving, and drop data that is no whole message. May be called again."""
        self._decoder.drop()
        self._arrivals.close()

    def close(self) -> None:
        """Stop receiving and sending, and close all descriptors held. May be called again."""
        self.stop_receiving()
        for frame in list(self._frames):
            self._let_go(frame)

    def drop_unsent(self) -> None:
        """Drop unsent messages; no other thread may be sending."""
        self._frames.clear()
        self.unsent_bytes = 0

    def _say(self, message: Message, descriptors: Sequence[int]) -> None:
        """Send a message, or an error instead of a message that cannot be sent: too large, or a bug here."""
        try:
            parts = encode_parts(message, self._sending)
        except (ResourceExhausted, InvalidMessage) as error:
            _log.error("an answer cannot be sent: %s", error)
            close_all(descriptors)
            plain = error_to_map(error if isinstance(error, HonedError) else Internal(str(error)))
            instead: Message = Notification(method="Error", params=plain)
            if isinstance(message, Response):
                instead = Response(msgid=message.msgid, error=plain, result=None)
            parts, descriptors = [encode(instead)], ()
        self._put(parts, tuple(descriptors), own=True)

    def _put(
        self,
        parts: Sequence[bytes | memoryview],
        descriptors: tuple[int, ...],
        *,
        own: bool,
        call: int | None = None,
    ) -> None:
        self._frames.append(_Frame(deque(parts), descriptors, own, call))
        self.unsent_bytes += sum(map(len, parts))
        self.unsent_descriptors += len(descriptors)

    def _let_go(self, frame: _Frame) -> None:
        """Drop the descriptors of a frame, which were sent or never will be; close those it owns."""
        if frame.own:
            close_all(frame.descriptors)
        self.unsent_descriptors -= len(frame.descriptors)
        frame.descriptors = ()


def read_socket(connected: socket.socket, peer: Peer) -> bool:
    """Read once and pass the data to the peer; return False at the end of the stream.

    Raises ProtocolError, and OSError: BlockingIOError if a non-blocking socket has no data.
    """
    data, descriptors, flags = _read(connected)
    peer.receive(data, descriptors, truncated=bool(flags & _TRUNCATED))
    return bool(data)


def discard_input(connected: socket.socket) -> bool:
    """Read once and discard the data; return False at the end of the stream.

    Raise OSError as `read_socket` does.
    """
    data, descriptors, _ = _read(connected)
    close_all(descriptors)
    return bool(data)


def write_socket(connected: socket.socket, peer: Peer) -> bool:
    """Write all that the peer has to send, or what a non-blocking socket accepts; return whether it sent any.

    Raises OSError.
    """
    progress = False
    while peer.unsent_bytes and (piece := peer.to_send()) is not None:
        data, descriptors = piece
        try:
            sent = socket.send_fds(connected, [data], descriptors) if descriptors else connected.send(data)
        except BlockingIOError:
            break
        peer.record_sent(sent)
        progress = True
    return progress


def _read(connected: socket.socket) -> tuple[bytes, list[int], int]:
    """Return bytes, descriptors and flags of one read.

    Does what `socket.recv_fds` does, but faster if no descriptors arrived.
    """
    data, ancillary, flags, _ = connected.recvmsg(_CHUNK, _ANCILLARY, _CLOEXEC)
    if not ancillary:
        return data, [], flags
    descriptors = array.array("i")
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(packed[: len(packed) - len(packed) % descriptors.itemsize])
    return data, list(descriptors), flags
