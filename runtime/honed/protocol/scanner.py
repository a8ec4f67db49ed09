"""Finds where a MessagePack value ends without building it, and holds it to limits on the way.

What a peer announces (sizes, counts, nesting) is refused when announced, so that memory follows what was
really sent.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from .errors import InvalidArgument, ResourceExhausted
from .wire import FrameLimits


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


class Scanner:
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
