"""The meeting place of a farm: Dask's scheduler, which knows who is there and passes on what they send."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import dask
from distributed import Scheduler

from honed.protocol.errors import Unavailable

from .security import checked, security

SETTINGS = {
    "distributed.scheduler.http.routes": [],  # nothing is told over HTTP, which TLS does not guard here
    "distributed.worker.http.routes": [],
    "distributed.scheduler.worker-ttl": "30 seconds",  # a board that lost its power closes no connection
    "distributed.scheduler.worker-saturation": "inf",  # candidates have their boards when they are sent
    "distributed.worker.daemon": False,
}
NOWHERE = "127.0.0.1:0"  # where Dask's page for browsers, which is not used, would be


def run(url: str, certificates: Path | None, tell: Callable[[str], None]) -> None:
    """Be the scheduler at that address until SIGINT or SIGTERM; `tell` gets a sentence when it listens.

    Raises InvalidArgument and NotFound as `checked` and `security` do, Unavailable where it cannot listen.
    """
    url = checked(url)
    guard = security(url, certificates)
    parts = urlsplit(url)

    async def serve() -> None:
        stop = stopping()
        try:
            scheduler = await Scheduler(
                host=f"{parts.scheme}://{parts.hostname}",
                port=parts.port,
                protocol=parts.scheme,
                security=guard,
                dashboard=False,
                dashboard_address=NOWHERE,
            )
        except (OSError, RuntimeError) as error:  # as which Dask tells of the other
            why = error.__cause__ or error
            raise Unavailable(
                f"cannot listen at {url} ({getattr(why, 'strerror', None) or why}); try another address"
            ) from error
        async with scheduler:
            tell(f"boards may join at {scheduler.address}")
            await stop.wait()

    quiet()
    with dask.config.set(SETTINGS):
        asyncio.run(serve())


def stopping() -> asyncio.Event:
    """Set by SIGINT and SIGTERM."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


def quiet() -> None:
    """Dask's own words are for those who look for them; what matters is told."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
