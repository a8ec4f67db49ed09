"""Who may be in a farm: those with a certificate of its own authority; without TLS, this machine alone."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from distributed import Security

from honed.protocol.errors import InvalidArgument, NotFound

DEFAULT_PORT = 8786
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


def checked(url: str) -> str:
    """The address of a scheduler, with its port: `tls://HOST[:PORT]`, or `tcp://` on loopback.

    Raises InvalidArgument for anything else: who reaches a scheduler has every worker run what he likes.
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
    """How to talk to a scheduler at a `checked` address, with the certificates in `folder`.

    Both sides show a certificate of the authority in it. Raises InvalidArgument for TLS without a folder,
    NotFound where files are missing.
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
