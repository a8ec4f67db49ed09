"""Which addresses a bridge may listen on."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from honed.protocol.errors import InvalidArgument

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_ENDPOINT: Final = re.compile(r"(ipc|tcp)://(.+)")
_TCP: Final = re.compile(r"\[?([0-9a-fA-F.:]+?)\]?:([0-9]{1,5})")
_MAX_SOCKET_PATH: Final = 107  # bytes of sun_path


def ip_address(text: str) -> IpAddress:
    """The address; raises InvalidArgument for names and whatever else is none."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise InvalidArgument(f"address is {text!r}; give an IP address, as 127.0.0.1 or ::1") from None


def check_endpoint(endpoint: str, *, network: bool) -> None:
    """Raise InvalidArgument unless `endpoint` is a path or an address that ZeroMQ can be bound to.

    Addresses that other machines reach are allowed with `network` only.
    """
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None:
        raise InvalidArgument(
            f"endpoint is {endpoint!r}; give ipc:// with a path, or tcp:// with address:port"
        )
    kind, place = found.groups()
    if kind == "ipc":
        if not place.startswith("/") or len(place.encode()) > _MAX_SOCKET_PATH or "\0" in place:
            raise InvalidArgument(
                f"endpoint is {endpoint!r}; give an absolute path of at most {_MAX_SOCKET_PATH} bytes after ipc://"
            )
        return
    parts = _TCP.fullmatch(place)
    if parts is None or not 0 < int(parts[2]) < 65536:
        raise InvalidArgument(
            f"endpoint is {endpoint!r}; give an IP address and a port, as tcp://127.0.0.1:5555"
        )
    if not ip_address(parts[1]).is_loopback and not network:
        raise InvalidArgument(
            f"endpoint is {endpoint!r}, which other machines reach, and anyone there could use it; "
            "give network = true if that is meant"
        )
