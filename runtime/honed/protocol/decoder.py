"""Decodes bytes to messages, for one direction of one connection; scans each message before building it.

A small message that arrived alone is built at once if only the limit on depth could be exceeded, as building
is many times faster than scanning. If it is wrong, scanning finds the error and words it as usual.
"""

from __future__ import annotations

import enum
import mmap
from typing import Any, Final, NamedTuple

import msgpack

from .errors import HonedError, InvalidArgument, ResourceExhausted
from .wire import (
    APART,
    LARGE,
    MAX_MSGID,
    NOTIFICATION,
    REQUEST,
    RESPONSE,
    FrameLimits,
    Message,
    Notification,
    ProtocolError,
    Request,
    Response,
)

_APART: Final = b"\xd6\x01"  # An extension type of 4 bytes, which no peer may send
_TIMESTAMP: Final = msgpack.Timestamp
# Bytes that begin values of extension types, and those that begin neither these nor a container: a message
# with few others is not nested deeper than their number.
_EXTENDED: Final = frozenset(b"\xc7\xc8\xc9\xd4\xd5\xd6\xd7\xd8")
_PLAIN: Final = bytes(b for b in range(256) if not (0x80 <= b <= 0x9F or 0xDC <= b <= 0xDF or b in _EXTENDED))
_TIME: Final = 0xFF  # Type of timestamps, the one extension type that `ext_hook` does not see
_INSIDE: Final = frozenset({list, dict, _TIMESTAMP})  # Types to look into


class FrameDecoder:
    """A decoder: bytes in with `feed`, messages out with `next_message`, for one direction of a connection.

    After a ProtocolError the stream has no known boundary: drop the connection.
    """

    def __init__(self, limits: FrameLimits | None = None, *, large: int | None = None) -> None:
        """Set up the decoder; data of at least `large` bytes becomes memoryviews, copied once on arrival."""
        self._limits = limits or FrameLimits()
        self._large = large
        self._buffer = bytearray()
        self._scanner = Scanner(self._limits, large)
        self._small = _small(self._limits, large)
        self._begun = False  # The scanner has started the present message
        self._large_items: list[memoryview] = []  # Large data of the present message
        self._missing = 0  # Bytes of the last of these that have not arrived
        self._large_bytes = 0  # Bytes of the present message that arrived and left the buffer
        self.frame_bytes = 0  # Bytes of the message returned last

    @property
    def buffered(self) -> int:
        """The number of bytes received that are not yet part of a returned message."""
        return len(self._buffer) + self._large_bytes

    def feed(self, data: bytes | memoryview) -> None:
        """Append bytes in the order in which they arrived."""
        if self._missing:
            taken = min(self._missing, len(data))
            self._fill(memoryview(data)[:taken])
            data = data[taken:]
        self._buffer += data

    def drop(self) -> None:
        """Drop the bytes that arrived: nothing more is fed, and no message will be whole."""
        self._buffer = bytearray()
        self._large_items, self._missing, self._large_bytes = [], 0, 0

    def _fill(self, data: memoryview) -> None:
        """Append to the large data that is incomplete."""
        target = self._large_items[-1]
        at = len(target) - self._missing
        target[at : at + len(data)] = data
        self._missing -= len(data)
        self._large_bytes += len(data)

    def _take_large(self, start: int, payload: int, count: int) -> None:
        """Move data that begins in the buffer to its own memory, whose pages are untouched until filled."""
        self._large_items.append(memoryview(mmap.mmap(-1, count) if count >= LARGE else bytearray(count)))
        self._missing = count
        here = min(count, len(self._buffer) - payload)
        with memoryview(self._buffer) as whole, whole[payload : payload + here] as data:
            self._fill(data)
        placeholder = _APART + (len(self._large_items) - 1).to_bytes(4, "big")
        self._large_bytes += payload - start - len(placeholder)
        self._buffer[start : payload + here] = placeholder
        self._scanner.pass_large(len(placeholder))

    def next_message(self) -> Message | None:
        """Return the next whole message, or None if more bytes are needed; raise ProtocolError."""
        if not self._buffer:
            return None
        if self._buffer[0] not in (0x93, 0x94):
            raise ProtocolError(InvalidArgument("this is no MessagePack-RPC message; send arrays of 3 or 4"))
        if not self._begun and (message := self._at_once()) is not None:
            return message
        self._begun = True
        try:
            end = None if self._missing else self._scanner.end(self._buffer)
            while self._scanner.large is not None and not self._missing:
                self._take_large(*self._scanner.large)
                end = None if self._missing else self._scanner.end(self._buffer)
        except HonedError as error:
            raise ProtocolError(error, self._msgid()) from error
        if end is None:
            return None
        message = self._decode(end)
        del self._buffer[:end]
        self._scanner, self._begun = Scanner(self._limits, self._large), False
        self.frame_bytes = end + self._large_bytes
        self._large_items, self._large_bytes = [], 0
        return message

    def _at_once(self) -> Message | None:
        """Return the message that fills the buffer exactly, and empty the buffer.

        Returns None if the buffer is no message, is more than one, or must be scanned.
        """
        if len(self._buffer) > self._small:
            return None
        try:
            value = msgpack.unpackb(
                self._buffer, raw=False, strict_map_key=True, use_list=True, ext_hook=_refuse_extension
            )
        except (ValueError, msgpack.UnpackException):
            return None
        message, depth = _as_message(value), self._limits.max_depth
        marks = self._buffer.translate(None, _PLAIN)
        timed = _TIME in self._buffer and not _EXTENDED.isdisjoint(marks)
        if message is None or ((timed or len(marks) > depth) and not _flat_enough(message, depth)):
            return None
        self.frame_bytes = len(self._buffer)
        self._buffer.clear()
        return message

    def _decode(self, end: int) -> Message:
        with memoryview(self._buffer) as whole, whole[:end] as frame:
            try:
                value = msgpack.unpackb(
                    frame, raw=False, strict_map_key=True, use_list=True, ext_hook=self._placeholder_data
                )
            except UnicodeDecodeError as error:
                raise self._protocol_error("the message holds text that is not UTF-8; send UTF-8") from error
            except ValueError as error:
                raise self._protocol_error(
                    "the message holds map keys that are not strings; use strings"
                ) from error
        message = _as_message(value)
        if message is None:
            raise self._protocol_error(
                "the message is none of [0, msgid, method, [params]], [1, msgid, error, result] and "
                "[2, method, [params]]; send one of these, with a map as params"
            )
        return message

    def _placeholder_data(self, _code: int, index: bytes) -> memoryview:
        """Return the data of a placeholder; scanning refuses a peer's own extension types first."""
        return self._large_items[int.from_bytes(index, "big")]

    def _protocol_error(self, sentence: str) -> ProtocolError:
        return ProtocolError(InvalidArgument(sentence), self._msgid())

    def _msgid(self) -> int | None:
        """Return the number of the request at the start of the buffer; None if there is none."""
        unpacker = msgpack.Unpacker(max_buffer_size=16)
        unpacker.feed(bytes(self._buffer[:12]))
        try:
            if unpacker.read_array_header() != 4 or unpacker.unpack() != REQUEST:
                return None
            msgid = unpacker.unpack()
        except (ValueError, msgpack.UnpackException):
            return None
        return msgid if _is_msgid(msgid) else None


def _small(limits: FrameLimits, large: int | None) -> int:
    """Return the largest size in bytes of a message that cannot exceed limits other than that on depth."""
    small = APART if large is None else min(APART, large)
    return small if min(limits.max_bytes, limits.max_values, limits.max_text) >= small else 0


def _flat_enough(message: Message, max_depth: int) -> bool:
    """Return whether containers are nested no deeper than `max_depth` and none holds a timestamp.

    A timestamp is an extension type.
    """
    if isinstance(message, Response):
        level: list[Any] = [[message.error, message.result]]
    else:  # The params lie in a list in the message
        level, max_depth = [message.params], max_depth - 2
    for _ in range(max_depth):
        inside: list[Any] = []
        for each in level:
            inner = each if type(each) is list else each.values()
            if not _INSIDE.isdisjoint(map(type, inner)):
                inside += [one for one in inner if type(one) in _INSIDE]
        if not inside:
            return True
        if _TIMESTAMP in map(type, inside):
            return False
        level = inside
    return False


def _refuse_extension(_code: int, _data: bytes) -> None:
    raise ValueError("an extension type")


def _is_msgid(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_MSGID


def _as_message(value: list[Any]) -> Message | None:
    """Return the message that a list encodes; None if it encodes none."""
    kind = value[0]
    if type(kind) is not int:  # False and 0.0 are equal to 0 but no message type
        return None
    if kind == NOTIFICATION and len(value) == 3:
        _, method, params = value
        return Notification(method=method, params=params[0]) if _is_call(method, params) else None
    if len(value) != 4 or not _is_msgid(value[1]):
        return None
    _, msgid, second, third = value
    if kind == REQUEST and _is_call(second, third):
        return Request(msgid=msgid, method=second, params=third[0])
    if kind == RESPONSE and second is None:
        return Response(msgid=msgid, error=None, result=third)
    if kind == RESPONSE and type(second) is dict and third is None:
        return Response(msgid=msgid, error=second, result=None)
    return None


def _is_call(method: object, params: object) -> bool:
    return (
        type(method) is str
        and type(params) is list
        and len(params) == 1
        and type(params[0]) is dict
        and _TEXT.issuperset(map(type, params[0]))
    )


_TEXT: Final = frozenset({str})


# Sizes, counts and nesting are refused when a peer announces them, so that memory is only reserved for data
# that arrived.
class _Family(enum.Enum):
    PLAIN = enum.auto()  # `extra` bytes of payload
    BYTES = enum.auto()  # A length in `extra` bytes, then that many bytes
    TEXT = enum.auto()  # A length like BYTES, then UTF-8
    ARRAY = enum.auto()  # A count in `extra` bytes (0: it is `items`), then that many values
    MAP = enum.auto()  # A count of pairs, then twice as many values
    REFUSED = enum.auto()


_STRINGS: Final = (_Family.BYTES, _Family.TEXT)


class _Header(NamedTuple):
    """The meaning of a value's first byte (MessagePack specification, "Formats")."""

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


class Scanner:
    """A scanner that finds where the value at the start of a growing buffer ends, without building it.

    It keeps its state: each byte is read once, however small the pieces are that arrive.
    """

    def __init__(self, limits: FrameLimits, large: int | None) -> None:
        self._limits = limits
        self._large = large
        self.large: tuple[int, int, int] | None = None  # Header, start and size of large data
        self._apart = 0  # Bytes of the message that left the buffer
        self._position = 0
        self._texts = 0  # Bytes of text so far
        self._values = 0  # Values announced so far
        self._missing = [1]  # Values still to come, by open container, the message itself first

    def end(self, buffer: bytearray) -> int | None:
        """Return the length of the value, or None if more bytes are needed; raise HonedError."""
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
                raise InvalidArgument(
                    f"the message holds byte 0x{buffer[self._position]:02x} where a MessagePack value must "
                    "start; send MessagePack without extension types"
                )
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
        """Skip the data that `large` describes, replaced in the buffer by `placeholder` bytes."""
        assert self.large is not None
        start, payload, count = self.large
        self._apart += payload + count - start - placeholder
        self._position = start + placeholder
        self._missing[-1] -= 1
        while self._missing and not self._missing[-1]:
            self._missing.pop()
        self.large = None

    def _enter(self, family: _Family, payload: int, count: int, size: int) -> bool:
        """Skip a whole string, or the header of a container; return False if the string is incomplete."""
        if family in _STRINGS:
            self._check_size(payload + count)
            text = count if family is _Family.TEXT else 0
            if self._texts + text > self._limits.max_text:
                raise ResourceExhausted(
                    f"the message holds more than {self._limits.max_text} bytes of text; send data as bin"
                )
            if payload + count > size:
                return False
            self._texts += text
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
