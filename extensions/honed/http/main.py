"""Runs the program `honed-http`, whose connections are bounded in number and time."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from honed import bridge
from honed.bridge import ip_address
from honed.protocol.errors import Unavailable
from honed.runtime import AsyncClient

from .app import HttpSettings, application

_WHY: Final = b'{"error": "there are too many connections; close one, or try again later"}'
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%b" % (len(_WHY), _WHY)
)
CONFIG: Final = Path("/etc/honed/honed-http.toml")
_BACKLOG: Final = 64
_log = logging.getLogger(__name__)


class BoundedConnection(H11Protocol):  # type: ignore[misc]  # uvicorn 0.17 has no types
    """A connection that bounds how long its client may take to send a request and to read the answer.

    uvicorn and h11 bound the head of a request (16 KiB) and the idle time of a connection.
    """

    settings: ClassVar[HttpSettings]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, or answer 503 and close it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.write(_FULL)
            transport.close()
            return
        self._watch_arrival()

    def data_received(self, data: bytes) -> None:
        """Process data, and limit the time until the rest of the request arrives."""
        super().data_received(data)
        self._watch_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the connection's timers."""
        for timer in (self._arrival, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Pause, and limit the time until the client reads."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Resume, and limit the time until the client reads the rest."""
        super().resume_writing()
        self._watch_writing()

    def on_response_complete(self) -> None:
        """Limit the time until the client reads the end, and until the next request, if begun, arrives."""
        super().on_response_complete()
        self._watch_writing()
        if not self.cycle.response_complete:  # The next request has arrived already
            self._unset_keepalive_if_required()
            self._watch_arrival()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP if nothing is being answered; the requests before it are abandoned."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _watch_arrival(self) -> None:
        """Start the timer for an incomplete request, and stop it for a complete one."""
        cycle = self.cycle
        if cycle is not None and not (cycle.more_body or cycle.response_complete):
            if self._arrival is not None:
                self._arrival.cancel()
                self._arrival = None
        elif self._arrival is None:
            self._arrival = self.loop.call_later(self.settings.arrival_seconds, self.transport.abort)

    def _watch_writing(self) -> None:
        """Restart the timer for unread bytes of the answer; there is none if the client has read all."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        if self.transport.get_write_buffer_size():
            self._writing = self.loop.call_later(self.settings.write_seconds, self.transport.abort)


def protocol(settings: HttpSettings) -> type[asyncio.Protocol]:
    """Return the class of connections with these settings."""
    return type("ConfiguredConnection", (BoundedConnection,), {"settings": settings})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bridge, and return the exit status."""
    return bridge.launch(parser(), arguments, HttpSettings, CONFIG, _serve)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's options."""
    return bridge.parser(
        "honed-http", "Serve models of a honed service over HTTP, by the Open Inference Protocol.", CONFIG
    )


def _serve(settings: HttpSettings, service_socket: str | None) -> None:
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # Malformed requests are no news
    listening = _listen(settings)
    app = application(settings, AsyncClient(service_socket, timeout=settings.infer_seconds))
    config = uvicorn.Config(
        app,
        http=protocol(settings),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.idle_seconds,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # Needed until uvicorn sets its own handlers; a newer uvicorn also raises its signal again at the end.
        signal.signal(number, lambda *_: sys.exit(0))
    uvicorn.Server(config).run(sockets=[listening])


def _listen(settings: HttpSettings) -> socket.socket:
    """Return a socket that listens at the address; raise Unavailable if it cannot."""
    address = ip_address(settings.address)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.address, settings.port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise Unavailable(
            f"{settings.address} port {settings.port} cannot be listened at ({error.strerror}); "
            "change address or port"
        ) from error
    host, port = listening.getsockname()[:2]
    _log.info("listening at http://%s:%d", f"[{host}]" if address.version == 6 else host, port)
    if not address.is_loopback:
        _log.warning("other machines reach %s, and anyone there may have models run", host)
    return listening


if __name__ == "__main__":
    sys.exit(main())
