"""Bytes to messages, for one direction of one connection; each is scanned before it is built.

A small one that came alone is built at once, where no bound but that on depth could be exceeded: building is
many times faster than scanning. Whatever is wrong with it is found, and said, by scanning all the same.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import msgpack

from .errors import HonedError, InvalidArgument
from .scanner import Scanner
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
    PeerFault,
    Request,
    Response,
)

_APART: Final = b"\xd6\x01"  # an extension type of 4 bytes, which no peer may send
_INSIDE: Final = frozenset({list, dict, msgpack.Timestamp})  # what has to be looked into


class Decoder:
    """Bytes in with `feed`, messages out with `next_message`, for one direction of one connection.

    After it raised PeerFault the stream has no known boundary: drop the connection.
    """

    def __init__(self, limits: FrameLimits | None = None, *, large: int | None = None) -> None:
        """Data of at least `large` bytes is given out as memoryviews, and copied once, as it comes."""
        self._limits = limits or FrameLimits()
        self._large = large
        self._buffer = bytearray()
        self._scanner = Scanner(self._limits, large)
        self._small = _small(self._limits, large)
        self._begun = False  # the scanner has seen the start of the present message
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

    def drop(self) -> None:
        """Let go of what came: nothing more is fed, and no message will be whole."""
        self._buffer = bytearray()
        self._apart, self._missing, self._apart_bytes = [], 0, 0

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
        if not self._begun and (message := self._at_once()) is not None:
            return message
        self._begun = True
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
        self._scanner, self._begun = Scanner(self._limits, self._large), False
        self.frame_bytes = end + self._apart_bytes
        self._apart, self._apart_bytes = [], 0
        return message

    def _at_once(self) -> Message | None:
        """The message that the buffer is; None where it is none, more than one, or has to be scanned."""
        if len(self._buffer) > self._small:
            return None
        try:
            value = msgpack.unpackb(
                self._buffer, raw=False, strict_map_key=True, use_list=True, ext_hook=_refused
            )
        except (ValueError, msgpack.UnpackException):
            return None
        message = _as_message(value) if _flat_enough(value, self._limits.max_depth) else None
        if message is not None:
            self.frame_bytes = len(self._buffer)
            self._buffer.clear()
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


def _small(limits: FrameLimits, large: int | None) -> int:
    """The bytes up to which a whole message is within all limits but that on depth."""
    small = APART if large is None else min(APART, large)
    return small if min(limits.max_bytes, limits.max_values, limits.max_text) >= small else 0


def _flat_enough(value: Any, max_depth: int) -> bool:
    """Whether containers are nested no deeper than this; no timestamp is, which is an extension type."""
    level = [value]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer if type(outer) is list else outer.values())
            if type(inner) in _INSIDE
        ]
        if not level:
            return True
        if msgpack.Timestamp in map(type, level):
            return False
    return False


def _refused(_code: int, _data: bytes) -> None:
    raise ValueError("an extension type")


def _is_msgid(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_MSGID


def _as_message(value: list[Any]) -> Message | None:
    """The message that a list of 3 or 4 is; None where it is none."""
    kind, *rest = value
    if type(kind) is not int:  # False and 0.0 are equal to 0 but no message type
        return None
    if kind == NOTIFICATION and len(rest) == 2:
        method, params = rest
        return Notification(method=method, params=params[0]) if _is_call(method, params) else None
    if len(rest) != 3 or not _is_msgid(rest[0]):
        return None
    msgid, second, third = rest
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
