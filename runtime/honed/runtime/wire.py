"""MessagePack-RPC without I/O: bytes in, messages out (docs/protocol.md, "Messages").

A frame is bounded before anything is built from it: a scanner walks the headers, so that what a peer
announces (sizes, counts, nesting) is refused when announced and memory follows what was really sent.
What the peer did wrong is a PeerFault; what this side did wrong is an OwnFault.
"""

from __future__ import annotations

import enum
import mmap
import secrets
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack

from .errors import HonedError, InvalidArgument, ResourceExhausted

LARGE: Final = 1 << 20  # bytes of data that are sent from where they are
APART: Final = 4096  # bytes of data that a service keeps out of the buffer it decodes
MAX_MSGID: Final = 2**32 - 1
REQUEST: Final = 0
RESPONSE: Final = 1
NOTIFICATION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """What one message may be."""

    max_bytes: int = 64 << 20
    max_depth: int = 16  # containers inside one another, the message's own array included
    max_values: int = 65_536  # in all containers together
    max_text: int = 1 << 30  # bytes of str in all, those below 32 not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`[0, msgid, method, [params]]`."""

    msgid: int
    method: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """`[1, msgid, error, result]`; where `error` is not None it counts, else `result`."""

    msgid: int
    error: dict[str, Any] | None
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """`[2, method, [params]]`."""

    method: str
    params: dict[str, Any]


Message = Request | Response | Notification


class OwnFault(TypeError):
    """An attempt of this side to send what is no message: a bug here, not the peer's doing."""


class PeerFault(Exception):
    """The peer broke the protocol; its connection cannot go on.

    `error` is what to tell it, `msgid` the request to answer with that where it could be read.
    """

    def __init__(self, error: HonedError, msgid: int | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.msgid = msgid


def encode_parts(message: Message, limits: FrameLimits | None = None) -> list[bytes | memoryview]:
    """The bytes of one message, in parts to be sent one after the other; raises as `encode`.

    Large memoryviews in a list that is a value of the params or the result are parts themselves: no copy is
    made of them.
    """
    limits = limits or FrameLimits()
    body = message.result if isinstance(message, Response) else message.params
    apart: dict[bytes, memoryview] = {}
    if isinstance(body, dict):
        body = {key: _set_apart(value, apart) for key, value in body.items()}
    if not apart:
        return [encode(message, limits)]
    match message:
        case Request(msgid=msgid, method=method):
            short: Message = Request(msgid=msgid, method=method, params=body)
        case Response(msgid=msgid, error=error):
            short = Response(msgid=msgid, error=error, result=body)
        case Notification(method=method):
            short = Notification(method=method, params=body)
    frame = encode(short, limits)
    parts: list[bytes | memoryview] = []
    for marker, data in apart.items():  # in the order in which they stand in the frame
        before, frame = frame.split(_MARKED + marker, 1)
        parts += [before + b"\xc6" + len(data).to_bytes(4, "big"), data]
    parts.append(frame)
    _check_bytes(sum(map(len, parts)), limits)
    return parts


_MARKED: Final = b"\xc4\x10"  # bin of 16 bytes


def _set_apart(value: Any, apart: dict[bytes, memoryview]) -> Any:
    """A list with markers, noted with what they stand for, in the place of its large memoryviews."""
    if type(value) is not list or not any(type(item) is memoryview and len(item) >= LARGE for item in value):
        return value
    marked = []
    for item in value:
        if type(item) is memoryview and len(item) >= LARGE:
            marker = secrets.token_bytes(16)
            apart[marker] = item
            marked.append(marker)
        else:
            marked.append(item)
    return marked


def encode(message: Message, limits: FrameLimits | None = None) -> bytes:
    """The bytes of one message; raises OwnFault where it is none, ResourceExhausted where it is too large."""
    limits = limits or FrameLimits()
    try:
        frame: bytes = msgpack.packb(_as_list(message), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise OwnFault(f"a message holds a value that cannot be sent: {error}") from error
    _check_bytes(len(frame), limits)
    return frame


def _check_bytes(nbytes: int, limits: FrameLimits) -> None:
    if nbytes > limits.max_bytes:
        raise ResourceExhausted(
            f"the message has {nbytes} bytes and {limits.max_bytes} are allowed; "
            "pass large tensors in shared memory"
        )


def _as_list(message: Message) -> list[Any]:
    match message:
        case Request():
            _own_msgid(message.msgid)
            return [REQUEST, message.msgid, message.method, [message.params]]
        case Response():
            _own_msgid(message.msgid)
            return [RESPONSE, message.msgid, message.error, message.result if message.error is None else None]
        case Notification():
            return [NOTIFICATION, message.method, [message.params]]


def _own_msgid(msgid: int) -> None:
    if not 0 <= msgid <= MAX_MSGID:
        raise OwnFault(f"message number {msgid} is not between 0 and {MAX_MSGID}")


class _Family(enum.Enum):
    PLAIN = enum.auto()  # `extra` bytes of payload
    BYTES = enum.auto()  # a length of `extra` bytes, then that many bytes
    TEXT = enum.auto()  # the same, to be read as UTF-8
    ARRAY = enum.auto()  # a count of `extra` bytes (0: it is `items`), then that many values
    MAP = enum.auto()  # a count likewise, then twice as many values
    REFUSED = enum.auto()


_STRINGS: Final = (_Family.BYTES, _Family.TEXT)


class _Header(NamedTuple):
    """What the first byte of a value says (MessagePack specification, "Formats")."""

    family: _Family
    extra: int = 0
    items: int = 0


def _header(first: int) -> _Header:
    if first <= 0x7F or first >= 0xE0:
        return _Header(_Family.PLAIN)
    if first <= 0x8F:
        return _Header(_Family.MAP, 0, first & 0x0F)
    if first <= 0x9F:
        return _Header(_Family.ARRAY, 0, first & 0x0F)
    if first <= 0xBF:
        return _Header(_Family.PLAIN, first & 0x1F)
    return _OTHER_HEADERS.get(first, _Header(_Family.REFUSED))


_OTHER_HEADERS = {
    0xC0: _Header(_Family.PLAIN),  # nil
    0xC2: _Header(_Family.PLAIN),  # false
    0xC3: _Header(_Family.PLAIN),  # true
    0xC4: _Header(_Family.BYTES, 1),
    0xC5: _Header(_Family.BYTES, 2),
    0xC6: _Header(_Family.BYTES, 4),
    0xCA: _Header(_Family.PLAIN, 4),  # float32
    0xCB: _Header(_Family.PLAIN, 8),  # float64
    **{0xCC + i: _Header(_Family.PLAIN, 1 << i) for i in range(4)},  # uint8 to uint64
    **{0xD0 + i: _Header(_Family.PLAIN, 1 << i) for i in range(4)},  # int8 to int64
    0xD9: _Header(_Family.TEXT, 1),
    0xDA: _Header(_Family.TEXT, 2),
    0xDB: _Header(_Family.TEXT, 4),
    0xDC: _Header(_Family.ARRAY, 2),
    0xDD: _Header(_Family.ARRAY, 4),
    0xDE: _Header(_Family.MAP, 2),
    0xDF: _Header(_Family.MAP, 4),
}
_HEADERS: tuple[_Header, ...] = tuple(_header(first) for first in range(256))


class _Scanner:
    """Finds where the value at the start of a growing buffer ends, without building it.

    Stateful: each byte is looked at once, however small the pieces are in which they come.
    """

    def __init__(self, limits: FrameLimits, large: int | None) -> None:
        self._limits = limits
        self._large = large
        self.large: tuple[int, int, int] | None = None  # where such data and its header start, and its bytes
        self._apart = 0  # bytes of the message that are not in the buffer any more
        self._position = 0
        self._texts = 0  # bytes so far
        self._values = 0  # announced so far
        self._missing = [1]  # values still to come, per open container; the message itself first

    def end(self, buffer: bytearray) -> int | None:
        """The length of the value, or None where more bytes are needed; raises HonedError."""
        missing, size = self._missing, len(buffer)
        while missing:
            if self._position >= size:
                return None
            family, extra, items = _HEADERS[buffer[self._position]]
            payload = self._position + 1 + extra
            if family is _Family.PLAIN:
                if payload > size:
                    return None
                self._position = payload
                missing[-1] -= 1
            elif family is _Family.REFUSED:
                raise _no_value(buffer[self._position])
            elif payload > size:
                return None
            else:
                count = int.from_bytes(buffer[self._position + 1 : payload], "big") if extra else items
                if family is _Family.BYTES and self._large is not None and count >= self._large:
                    self._check_size(payload + count)
                    self.large = (self._position, payload, count)
                    return None
                if not self._enter(family, payload, count, size):
                    return None
            while missing and not missing[-1]:
                missing.pop()
        self._check_size(self._position)
        return self._position

    def pass_large(self, placeholder: int) -> None:
        """What `large` tells of was taken out of the buffer, and so many bytes stand there in its place."""
        assert self.large is not None
        start, payload, count = self.large
        self._apart += payload + count - start - placeholder
        self._position = start + placeholder
        self._missing[-1] -= 1
        while self._missing and not self._missing[-1]:
            self._missing.pop()
        self.large = None

    def _enter(self, family: _Family, payload: int, count: int, size: int) -> bool:
        """Pass a string whole, or the header of a container; False where bytes of the string are missing."""
        if family in _STRINGS:
            self._check_size(payload + count)
            if family is _Family.TEXT:
                self._check_text(count)
            if payload + count > size:
                return False
            self._texts += count if family is _Family.TEXT else 0
            self._position = payload + count
            self._missing[-1] -= 1
            return True
        count *= 2 if family is _Family.MAP else 1
        self._values += count
        self._check_container(payload + count)
        self._position = payload
        self._missing[-1] -= 1
        self._missing.append(count)
        return True

    def _check_text(self, nbytes: int) -> None:
        if self._texts + nbytes > self._limits.max_text:
            raise ResourceExhausted(
                f"the message holds more than {self._limits.max_text} bytes of text; send data as bin"
            )

    def _check_container(self, least_end: int) -> None:
        self._check_size(least_end)
        if self._values > self._limits.max_values:
            raise ResourceExhausted(
                f"the message holds more than {self._limits.max_values} values; "
                "send tensors as bin, not as arrays"
            )
        if len(self._missing) > self._limits.max_depth:
            raise InvalidArgument(
                f"the message is nested deeper than {self._limits.max_depth}; send it flatter"
            )

    def _check_size(self, end: int) -> None:
        if end + self._apart > self._limits.max_bytes:
            raise ResourceExhausted(
                f"the message has at least {end + self._apart} bytes and {self._limits.max_bytes} are "
                "allowed; pass large tensors in shared memory"
            )


def _no_value(first: int) -> InvalidArgument:
    return InvalidArgument(
        f"the message holds byte 0x{first:02x} where a MessagePack value must start; "
        "send MessagePack without extension types"
    )


_APART: Final = b"\xd6\x01"  # an extension type of 4 bytes, which no peer may send


class Decoder:
    """Bytes in with `feed`, messages out with `next_message`, for one direction of one connection.

    After it raised PeerFault the stream has no known boundary: drop the connection.
    """

    def __init__(self, limits: FrameLimits | None = None, *, large: int | None = None) -> None:
        """Data of at least `large` bytes is given out as memoryviews, and copied once, as it comes."""
        self._limits = limits or FrameLimits()
        self._large = large
        self._buffer = bytearray()
        self._scanner = _Scanner(self._limits, large)
        self._apart: list[memoryview] = []  # data of the present message
        self._missing = 0  # bytes of the last of these
        self._apart_bytes = 0  # of the present message that came, and are not in the buffer
        self.frame_bytes = 0  # of the message that was given out last

    @property
    def buffered(self) -> int:
        """Bytes held that are not yet part of a message given out."""
        return len(self._buffer) + self._apart_bytes

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes as they came."""
        if self._missing:
            taken = min(self._missing, len(data))
            self._fill(memoryview(data)[:taken])
            data = data[taken:]
        self._buffer += data

    def _fill(self, data: memoryview) -> None:
        """Add to the data that is coming."""
        target = self._apart[-1]
        at = len(target) - self._missing
        target[at : at + len(data)] = data
        self._missing -= len(data)
        self._apart_bytes += len(data)

    def _take_large(self, start: int, payload: int, count: int) -> None:
        """Move data that begins in the buffer to memory of its own, which is not touched before it comes."""
        self._apart.append(memoryview(mmap.mmap(-1, count) if count >= LARGE else bytearray(count)))
        self._missing = count
        here = min(count, len(self._buffer) - payload)
        with memoryview(self._buffer) as whole, whole[payload : payload + here] as data:
            self._fill(data)
        placeholder = _APART + (len(self._apart) - 1).to_bytes(4, "big")
        self._apart_bytes += payload - start - len(placeholder)
        self._buffer[start : payload + here] = placeholder
        self._scanner.pass_large(len(placeholder))

    def next_message(self) -> Message | None:
        """The next whole message, or None where more bytes are needed; raises PeerFault."""
        if not self._buffer:
            return None
        if self._buffer[0] not in (0x93, 0x94):
            raise PeerFault(InvalidArgument("this is no MessagePack-RPC message; send arrays of 3 or 4"))
        try:
            end = None if self._missing else self._scanner.end(self._buffer)
            while self._scanner.large is not None and not self._missing:
                self._take_large(*self._scanner.large)
                end = None if self._missing else self._scanner.end(self._buffer)
        except HonedError as error:
            raise PeerFault(error, self._msgid()) from error
        if end is None:
            return None
        message = self._decode(end)
        del self._buffer[:end]
        self._scanner = _Scanner(self._limits, self._large)
        self.frame_bytes = end + self._apart_bytes
        self._apart, self._apart_bytes = [], 0
        return message

    def _decode(self, end: int) -> Message:
        with memoryview(self._buffer) as whole, whole[:end] as frame:
            try:
                value = msgpack.unpackb(
                    frame, raw=False, strict_map_key=True, use_list=True, ext_hook=self._placed
                )
            except UnicodeDecodeError as error:
                raise self._malformed("the message holds text that is not UTF-8; send UTF-8") from error
            except ValueError as error:
                raise self._malformed(
                    "the message holds map keys that are not strings; use strings"
                ) from error
        message = _as_message(value)
        if message is None:
            raise self._malformed(
                "the message is none of [0, msgid, method, [params]], [1, msgid, error, result] and "
                "[2, method, [params]]; send one of these, with a map as params"
            )
        return message

    def _placed(self, _code: int, index: bytes) -> memoryview:
        """The data that a placeholder stands for; extension types of a peer never come here."""
        return self._apart[int.from_bytes(index, "big")]

    def _malformed(self, sentence: str) -> PeerFault:
        return PeerFault(InvalidArgument(sentence), self._msgid())

    def _msgid(self) -> int | None:
        """The number of the request at the start of the buffer, where there is one."""
        unpacker = msgpack.Unpacker(max_buffer_size=16)
        unpacker.feed(bytes(self._buffer[:12]))
        try:
            if unpacker.read_array_header() != 4 or unpacker.unpack() != REQUEST:
                return None
            msgid = unpacker.unpack()
        except (ValueError, msgpack.UnpackException):
            return None
        return msgid if _is_msgid(msgid) else None


def _is_msgid(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_MSGID


def _as_message(value: list[Any]) -> Message | None:
    if type(value[0]) is not int:
        return None  # False and 0.0 are equal to 0 but no message type
    match value:
        case [0, msgid, str(method), [dict(params)]] if _is_msgid(msgid) and _string_keys(params):
            return Request(msgid=msgid, method=method, params=params)
        case [1, msgid, None, result] if _is_msgid(msgid):
            return Response(msgid=msgid, error=None, result=result)
        case [1, msgid, dict(error), None] if _is_msgid(msgid):
            return Response(msgid=msgid, error=error, result=None)
        case [2, str(method), [dict(params)]] if _string_keys(params):
            return Notification(method=method, params=params)
        case _:
            return None


def _string_keys(params: dict[Any, Any]) -> bool:
    return all(type(key) is str for key in params)
