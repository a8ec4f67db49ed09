"""HTTP connections within bounds: how many there are, and how long a client may take to ask and to listen.

uvicorn and h11 bound the head of a request (16 KiB) and how long a connection may be idle.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .settings import HttpSettings

_WHY: Final = b'{"error": "there are too many connections; close one, or try again later"}'
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%b" % (len(_WHY), _WHY)
)


class BoundedConnection(H11Protocol):  # type: ignore[misc]  # uvicorn 0.17 has no types
    """One connection."""

    settings: ClassVar[HttpSettings]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take it, or send it away where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.write(_FULL)
            transport.close()
            return
        self._watch_arrival()

    def data_received(self, data: bytes) -> None:
        """Watch that the rest comes, too."""
        super().data_received(data)
        self._watch_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        for timer in (self._arrival, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Watch that the client reads."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Watch that it reads the rest."""
        super().resume_writing()
        self._watch_writing()

    def on_response_complete(self) -> None:
        """Watch that it reads the end, and that a request that has begun to come does come."""
        super().on_response_complete()
        self._watch_writing()
        if not self.cycle.response_complete:  # the next request had come already
            self._unset_keepalive_if_required()
            self._watch_arrival()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, if nothing is being answered; what came before the nonsense is given up."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _watch_arrival(self) -> None:
        """Set the clock for a request of which something is missing, and stop it for a whole one."""
        cycle = self.cycle
        if cycle is not None and not (cycle.more_body or cycle.response_complete):
            if self._arrival is not None:
                self._arrival.cancel()
                self._arrival = None
        elif self._arrival is None:
            self._arrival = self.loop.call_later(self.settings.arrival_seconds, self.transport.abort)

    def _watch_writing(self) -> None:
        """Set the clock anew for what the client has not read, when it reads or is given more."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        if self.transport.get_write_buffer_size():
            self._writing = self.loop.call_later(self.settings.write_seconds, self.transport.abort)


def protocol(settings: HttpSettings) -> type[asyncio.Protocol]:
    """The class of connections that keep to these settings."""
    return type("ConfiguredConnection", (BoundedConnection,), {"settings": settings})
