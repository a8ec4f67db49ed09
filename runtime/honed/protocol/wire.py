"""The messages of MessagePack-RPC, and their encoding (docs/protocol.md, "Messages").

Errors of the peer raise ProtocolError, errors of this side InvalidMessage.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import msgpack

from .errors import HonedError, ResourceExhausted
from .strict import Map

LARGE: Final = 1 << 20  # Smallest data in bytes that is sent without copying
APART: Final = 8192  # Smallest data in bytes that a service keeps out of the buffer it decodes
MAX_MSGID: Final = 2**32 - 1
REQUEST: Final = 0
RESPONSE: Final = 1
NOTIFICATION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """The limits of one message."""

    max_bytes: int = 64 << 20
    max_depth: int = 16  # Nested containers, the message's own array included
    max_values: int = 65_536  # Values in all containers together
    max_text: int = 1 << 30  # Bytes of str in all, not counting those shorter than 32


_USUAL: Final = FrameLimits()


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class Request:
    """A request: `[0, msgid, method, [params]]`."""

    msgid: int
    method: str
    params: Map


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class Response:
    """An answer: `[1, msgid, error, result]`; `result` counts only if `error` is None."""

    msgid: int
    error: Map | None
    result: Any


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class Notification:
    """A notification, which has no answer: `[2, method, [params]]`."""

    method: str
    params: Map


Message = Request | Response | Notification


class InvalidMessage(TypeError):
    """Raised when this side tries to send what is no message: a bug here, not an error of the peer."""


class ProtocolError(Exception):
    """Raised when the peer broke the protocol; its connection must end.

    `error` is to be sent to it, as answer to the request `msgid` if that could be read.
    """

    def __init__(self, error: HonedError, msgid: int | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.msgid = msgid


def encode_parts(message: Message, limits: FrameLimits = _USUAL) -> list[bytes | memoryview]:
    """Return the bytes of one message in pieces, to be sent in order; raise as `encode` does.

    Large memoryviews in a list that is a value of the params or the result are pieces of their own, without
    copying.
    """
    body = message.result if isinstance(message, Response) else message.params
    for value in body.values() if type(body) is dict else ():
        if type(value) is list and _holds_large(value):
            break
    else:
        return [encode(message, limits)]
    field = "result" if isinstance(message, Response) else "params"
    apart: dict[bytes, memoryview] = {}
    changes: Map = {field: {key: _set_apart(value, apart) for key, value in body.items()}}
    frame = encode(replace(message, **changes), limits)
    parts: list[bytes | memoryview] = []
    for marker, data in apart.items():  # Same order as in the frame
        before, frame = frame.split(_MARKED + marker, 1)
        parts += [before + b"\xc6" + len(data).to_bytes(4, "big"), data]
    parts.append(frame)
    if (nbytes := sum(map(len, parts))) > limits.max_bytes:
        raise _too_large(nbytes, limits)
    return parts


_MARKED: Final = b"\xc4\x10"  # Bin of 16 bytes


def _holds_large(items: list[Any]) -> bool:
    for item in items if memoryview in map(type, items) else ():
        if type(item) is memoryview and len(item) >= LARGE:
            return True
    return False


def _set_apart(value: Any, large: dict[bytes, memoryview]) -> Any:
    """Return a list with markers in place of its large memoryviews; add these to `large` by marker.

    Returns any other value unchanged.
    """
    if type(value) is not list or not _holds_large(value):
        return value
    marked = []
    for item in value:
        if type(item) is memoryview and len(item) >= LARGE:
            marker = secrets.token_bytes(16)
            large[marker] = item
            marked.append(marker)
        else:
            marked.append(item)
    return marked


def encode(message: Message, limits: FrameLimits = _USUAL) -> bytes:
    """Return the bytes of one message.

    Raises InvalidMessage if a value of it cannot be sent, ResourceExhausted if it is too large.
    """
    try:
        frame: bytes = msgpack.packb(_as_list(message), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidMessage(f"a message holds a value that cannot be sent: {error}") from error
    if len(frame) > limits.max_bytes:
        raise _too_large(len(frame), limits)
    return frame


def _too_large(nbytes: int, limits: FrameLimits) -> ResourceExhausted:
    return ResourceExhausted(
        f"the message has {nbytes} bytes and {limits.max_bytes} are allowed; "
        "pass large tensors in shared memory"
    )


def _as_list(message: Message) -> list[Any]:
    if isinstance(message, Notification):
        return [NOTIFICATION, message.method, [message.params]]
    if not 0 <= message.msgid <= MAX_MSGID:
        raise InvalidMessage(f"message number {message.msgid} is not between 0 and {MAX_MSGID}")
    if isinstance(message, Request):
        return [REQUEST, message.msgid, message.method, [message.params]]
    return [RESPONSE, message.msgid, message.error, message.result if message.error is None else None]


class DescriptorQueue:
    """Descriptors received, until the message that they belong to is decoded.

    A read that returns descriptors ends within the bytes they were sent with: the kernel does not join later
    bytes to it (unix(7), "Ancillary messages"). So they belong to the first message that ends there or later.
    """

    def __init__(self) -> None:
        self._received = 0  # Bytes since some time at which none were held
        self.held: deque[tuple[int, list[int]]] = deque()  # Descriptors and the bytes received up to them

    def __len__(self) -> int:
        return sum(len(descriptors) for _, descriptors in self.held)

    def note(self, nbytes: int, descriptors: list[int]) -> None:
        """Record that a read received `nbytes` bytes with `descriptors`, which are kept until `take`.

        Reads without descriptors need not be recorded while none are held.
        """
        self._received += nbytes
        if descriptors:
            self.held.append((self._received, descriptors))

    def take(self, undecoded: int) -> list[int]:
        """Return the descriptors of the message just decoded, which the caller then closes.

        `undecoded` bytes follow that message.
        """
        taken: list[int] = []
        end = self._received - undecoded
        while self.held and self.held[0][0] <= end:
            taken += self.held.popleft()[1]
        return taken

    def close(self) -> None:
        """Close all descriptors held; may be called again."""
        while self.held:
            close_all(self.held.popleft()[1])


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors, which the caller owns."""
    for descriptor in descriptors:
        os.close(descriptor)


class Closing:
    """A base of what is closed at the end of a `with` block."""

    __slots__ = ()

    def close(self) -> None:
        """Release what it holds; may be called again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
