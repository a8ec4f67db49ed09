"""The program: `honed-http`."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvicorn

from honed.bridge import launch
from honed.bridge.addresses import ip_address
from honed.protocol.errors import Unavailable
from honed.runtime import AsyncClient

from .app import application
from .bounded import protocol
from .settings import HttpSettings

CONFIG: Final = Path("/etc/honed/honed-http.toml")
_BACKLOG: Final = 64
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bridge; gives the exit status."""
    return launch.launch(parser(), arguments, HttpSettings, CONFIG, _serve)


def parser() -> argparse.ArgumentParser:
    """The program's options."""
    return launch.parser(
        "honed-http", "Serve models of a honed service over HTTP, by the Open Inference Protocol.", CONFIG
    )


def _serve(settings: HttpSettings, service_socket: str | None) -> None:
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # a client's nonsense is no news
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
        # Before uvicorn listens to it; a newer one also ends with the signal that ended it.
        signal.signal(number, lambda *_: sys.exit(0))
    uvicorn.Server(config).run(sockets=[listening])


def _listen(settings: HttpSettings) -> socket.socket:
    """A socket that listens at the address; raises Unavailable where it cannot be had."""
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
