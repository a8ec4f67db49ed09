"""The messages of MessagePack-RPC, and their bytes (docs/protocol.md, "Messages").

What the peer did wrong is a PeerFault; what this side did wrong is an OwnFault.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgpack

from .errors import HonedError, ResourceExhausted
from .strict import Map

LARGE: Final = 1 << 20  # Bytes of data that are sent from where they are
APART: Final = 8192  # Bytes of data that a service keeps out of the buffer it decodes
MAX_MSGID: Final = 2**32 - 1
REQUEST: Final = 0
RESPONSE: Final = 1
NOTIFICATION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """What one message may be."""

    max_bytes: int = 64 << 20
    max_depth: int = 16  # Containers inside one another, the message's own array included
    max_values: int = 65_536  # In all containers together
    max_text: int = 1 << 30  # Bytes of str in all, those below 32 not counted


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class Request:
    """`[0, msgid, method, [params]]`."""

    msgid: int
    method: str
    params: Map


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class Response:
    """`[1, msgid, error, result]`; where `error` is not None it counts, else `result`."""

    msgid: int
    error: Map | None
    result: Any


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class Notification:
    """`[2, method, [params]]`."""

    method: str
    params: Map


Message = Request | Response | Notification


class InvalidMessage(TypeError):
    """An attempt of this side to send what is no message: a bug here, not the peer's doing."""


class ProtocolError(Exception):
    """The peer broke the protocol; its connection cannot go on.

    `error` is what to tell it, `msgid` the request to answer with that where it could be read.
    """

    def __init__(self, error: HonedError, msgid: int | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.msgid = msgid


def encode_parts(message: Message, limits: FrameLimits | None = None) -> list[bytes | memoryview]:
    """Return the bytes of one message, in pieces to be sent one after the other; raise as `encode` does.

    Large memoryviews in a list that is a value of the params or the result are pieces themselves: they are
    not copied.
    """
    limits = limits or _USUAL
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
    for marker, data in apart.items():  # In the order in which they stand in the frame
        before, frame = frame.split(_MARKED + marker, 1)
        parts += [before + b"\xc6" + len(data).to_bytes(4, "big"), data]
    parts.append(frame)
    _check_bytes(sum(map(len, parts)), limits)
    return parts


_USUAL: Final = FrameLimits()
_MARKED: Final = b"\xc4\x10"  # Bin of 16 bytes


def _holds_large(items: list[Any]) -> bool:
    return memoryview in map(type, items) and any(
        type(item) is memoryview and len(item) >= LARGE for item in items
    )


def _set_apart(value: Any, apart: dict[bytes, memoryview]) -> Any:
    """Return a list with markers in the place of its large memoryviews; note in `apart` what each is.

    Returns any other value unchanged.
    """
    if type(value) is not list or not _holds_large(value):
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
    """Return the bytes of one message.

    Raises OwnFault where a value of it cannot be sent, ResourceExhausted where it is too large.
    """
    limits = limits or _USUAL
    try:
        frame: bytes = msgpack.packb(_as_list(message), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidMessage(f"a message holds a value that cannot be sent: {error}") from error
    _check_bytes(len(frame), limits)
    return frame


def _check_bytes(nbytes: int, limits: FrameLimits) -> None:
    if nbytes > limits.max_bytes:
        raise ResourceExhausted(
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
    """Descriptors received, until the message that they came with is decoded.

    A read that brings descriptors ends within the bytes they were sent with: the kernel joins nothing that
    follows to it (unix(7), "Ancillary messages"). So they belong to the first message that ends there or
    later.
    """

    def __init__(self) -> None:
        self._received = 0  # Bytes since the connection began
        self._held: deque[tuple[int, list[int]]] = deque()  # With the last byte of the read they came in

    def __len__(self) -> int:
        return sum(len(descriptors) for _, descriptors in self._held)

    def note(self, nbytes: int, descriptors: list[int]) -> None:
        """Note that a read received `nbytes` bytes with `descriptors`, which are kept until `take`."""
        self._received += nbytes
        if descriptors:
            self._held.append((self._received, descriptors))

    def take(self, undecoded: int) -> list[int]:
        """Return the descriptors of the message just decoded, which become the caller's.

        `undecoded` bytes are left behind that message.
        """
        taken: list[int] = []
        if not self._held:
            return taken
        end = self._received - undecoded
        while self._held and self._held[0][0] <= end:
            taken += self._held.popleft()[1]
        return taken

    def close(self) -> None:
        """Close all that are held; may be called again."""
        while self._held:
            close_all(self._held.popleft()[1])


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors, all of them ours."""
    for descriptor in descriptors:
        os.close(descriptor)
