"""A client's socket in the event loop: when it is read and written, how its end shows; and its timers."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable


class ClientSocket:
    """A connected socket that does not block, and what is called when it can be read or written."""

    def __init__(
        self, connected: socket.socket, readable: Callable[[], None], writable: Callable[[], None]
    ) -> None:
        """Takes over the socket, in a running loop."""
        connected.setblocking(False)
        self.socket = connected
        self.reading = False
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._readable = readable
        self._writable = writable

    def read(self, wanted: bool) -> None:
        """Whether what the client sends is wanted now."""
        if wanted and not self.reading:
            self._loop.add_reader(self.socket, self._readable)
        elif not wanted and self.reading:
            self._loop.remove_reader(self.socket)
        self.reading = wanted

    def write(self, wanted: bool) -> None:
        """Whether there is something to write as soon as there is room."""
        if wanted and not self._writing:
            self._loop.add_writer(self.socket, self._writable)
        elif not wanted and self._writing:
            self._loop.remove_writer(self.socket)
        self._writing = wanted

    def gone(self) -> bool:
        """Whether the client has closed its end for both directions, or does not exist any more."""
        poll = select.poll()
        poll.register(self.socket, 0)
        return bool(poll.poll(0))

    def shut_down(self) -> None:
        """Show the client the end, and read on; raises OSError where it is gone."""
        self.socket.shutdown(socket.SHUT_WR)
        self.read(True)

    def close(self) -> None:
        """Nothing is read or written any more."""
        self.read(False)
        self.write(False)
        self.socket.close()


class Timer:
    """One call at a time, always after the same `seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]) -> None:
        self._loop = loop
        self.seconds = seconds
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Call back after the seconds, unless it is running already."""
        if self._handle is None:
            self._handle = self._loop.call_later(self.seconds, self._fire)

    def stop(self) -> None:
        """Do not call back."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
