"""What reading a file of a hub gives, and how much of it and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from honed.protocol.errors import InvalidArgument, Unavailable

WHOLE_SECONDS: Final = 300.0  # of one file
_CHUNK: Final = 1 << 16
_MOST_SAID: Final = 120  # letters


@dataclass(frozen=True, slots=True)
class Looked:
    """A file, None where it is as it was when it had the `tag` that was given; and its tag now.

    "" is the tag of a file that is to be read whole each time.
    """

    data: bytes | None
    tag: str = ""


def bounded(read: Callable[[int], bytes], most: int, name: str) -> bytes:
    """All there is; raises InvalidArgument beyond `most` bytes, Unavailable where it takes too long."""
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


def said(what: object) -> str:
    """What comes of a server, fit for a log."""
    return "".join(c if c.isprintable() else "?" for c in str(what)[:_MOST_SAID])
