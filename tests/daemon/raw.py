"""A client with neither manners nor honed: sends bytes, reads messages."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack


class Raw:
    """A connected socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(240)
        self.socket.connect(str(path))
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 28)
        self._next = 0

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        if descriptors:
            sent = socket.send_fds(self.socket, [data], descriptors)
            data = data[sent:]
        self.socket.sendall(data)

    def request(self, method: str, params: Any, descriptors: Sequence[int] = ()) -> int:
        self._next += 1
        self.send(packed(self._next, method, params), descriptors)
        return self._next

    def call(self, method: str, params: Any, descriptors: Sequence[int] = ()) -> list[Any]:
        msgid = self.request(method, params, descriptors)
        while (message := self.read()) is not None:
            if message[0] == 1 and message[1] == msgid:
                return message
        raise AssertionError("the service closed the connection")

    def read(self) -> list[Any] | None:
        """The next message; None at the end of the connection."""
        while True:
            with contextlib.suppress(msgpack.OutOfData):
                message: list[Any] = self._unpacker.unpack()
                return message
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._unpacker.feed(data)

    def rest(self) -> list[list[Any]]:
        """Every message until the service closes the connection."""
        return list(self._messages())

    def _messages(self) -> Iterator[list[Any]]:
        while (message := self.read()) is not None:
            yield message


def packed(msgid: int, method: str, params: Any) -> bytes:
    data: bytes = msgpack.packb([0, msgid, method, [params]])
    return data


def wait_until(end: float) -> None:
    """Sleep to a moment of time.monotonic's clock."""
    time.sleep(max(0.0, end - time.monotonic()))
