"""Runs the scheduler of a farm, which is Dask's, and decides who may connect to it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import dask
from distributed import Scheduler, Security

from honed.protocol.errors import InvalidArgument, NotFound, Unavailable

DEFAULT_PORT = 8786
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
SETTINGS = {
    "distributed.scheduler.http.routes": [],  # HTTP stays off, because TLS does not guard it here
    "distributed.worker.http.routes": [],
    "distributed.scheduler.worker-ttl": "30 seconds",  # A board that lost its power closes no connection
    "distributed.scheduler.worker-saturation": "inf",  # Candidates have their boards when they are sent
    "distributed.worker.daemon": False,
}
NOWHERE = "127.0.0.1:0"  # Address of Dask's web page, which is not used


def check_address(url: str) -> str:
    """Return the address of a scheduler, with its port: `tls://HOST[:PORT]`, or `tcp://` on loopback.

    Raises InvalidArgument for anything else: anyone who reaches a scheduler can run any code on every worker.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise InvalidArgument(f"{url[:80]!r} is no address ({error}); give tls://HOST:PORT") from error
    if parts.scheme not in ("tls", "tcp") or not host or parts.path not in ("", "/") or parts.username:
        raise InvalidArgument(f"{url[:80]!r} is no address of a farm; give tls://HOST:PORT")
    if parts.scheme == "tcp" and not _loopback(host):
        raise InvalidArgument(
            f"{url[:80]!r} is not encrypted, and {host} is not this machine; give tls://{host}:{port}"
        )
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def security(url: str, folder: Path | None) -> Security:
    """Return the security of a connection to a `check_address` address, with the certificates in `folder`.

    Both sides show a certificate of the authority in it. Raises InvalidArgument for TLS without a folder,
    NotFound if files are missing.
    """
    if not url.startswith("tls://"):
        return Security(require_encryption=False)
    if folder is None:
        raise InvalidArgument(f"{url} wants certificates; name their folder (--certificates DIR)")
    for name in (AUTHORITY, CERTIFICATE, KEY):
        if not (folder / name).is_file():
            raise NotFound(f"there is no {folder / name}; make it with `hone farm certificates`")
    certificate, key = str(folder / CERTIFICATE), str(folder / KEY)
    roles = ("client", "scheduler", "worker")
    return Security(
        require_encryption=True,
        tls_ca_file=str(folder / AUTHORITY),
        **{f"tls_{role}_cert": certificate for role in roles},
        **{f"tls_{role}_key": key for role in roles},
    )


def run(url: str, certificates: Path | None, tell: Callable[[str], None]) -> None:
    """Run the scheduler at that address until SIGINT or SIGTERM; `tell` gets a sentence when it listens.

    Raises InvalidArgument and NotFound as `check_address` and `security` do, Unavailable if it cannot listen.
    """
    url = check_address(url)
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
        except (OSError, RuntimeError) as error:  # Dask wraps the cause in a RuntimeError
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
    """Return an event that SIGINT and SIGTERM set."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


def quiet() -> None:
    """Silence Dask's own messages below errors."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
