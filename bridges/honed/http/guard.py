"""Who may ask what: requests that a web page had a browser make are refused, however it did so.

A page from elsewhere can have a browser on this machine send requests here. It then says so in Origin; or it
has its own name resolve to this address, and that name is in Host.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import Request

from honed.protocol.errors import PermissionDenied


class Guard:
    """Knows the names that this server goes by."""

    def __init__(self, address: str, hosts: Iterable[str]) -> None:
        self._hosts = {"localhost", "127.0.0.1", "::1", address, *hosts}

    def check(self, request: Request) -> None:
        """Raise PermissionDenied for a request that is not addressed to this server, or comes from a page."""
        host = request.headers.get("host", "")
        if not self._own(f"//{host}"):
            raise PermissionDenied(
                f"this server is not called {host[:200]!r}; ask for localhost, or add the name to hosts"
            )
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise PermissionDenied(f"pages of {origin[:200]!r} may not ask this server")

    def _own(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname
        except ValueError:
            return False
        return "*" in self._hosts or name in self._hosts
