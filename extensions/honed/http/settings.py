"""What `honed-http.toml` says."""

from __future__ import annotations

from dataclasses import dataclass

from honed.bridge.launch import check_numbers, ip_address
from honed.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Every setting with its default; raises InvalidArgument for values that are not allowed.

    address, port: where it listens. Other machines reach it only where the address is not one of this machine
    alone.
    hosts: names that requests may be addressed to, beside localhost and the address, no port; "*": any.
    page: whether the page of `hone report` is at /.
    max_connections: open at a time; more are answered 503 and closed.
    max_body_mib: of one request, and max_json_mib of the JSON in it.
    max_bodies_mib: of all requests that are not answered yet.
    arrival_seconds: from the first byte of a request, or the connection's start, to its last byte.
    write_seconds: how long a client may leave its answer unread.
    idle_seconds: how long a connection stays open without a request.
    infer_seconds: the longest an inference may wait and run; a request may ask for less.
    """

    address: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()
    page: bool = True
    max_connections: int = 64
    max_body_mib: int = 64
    max_json_mib: int = 8
    max_bodies_mib: int = 256
    arrival_seconds: float = 30.0
    write_seconds: float = 30.0
    idle_seconds: float = 60.0
    infer_seconds: float = 60.0

    def __post_init__(self) -> None:
        ip_address(self.address)
        check_numbers(
            self,
            port=0,
            max_connections=1,
            max_body_mib=1,
            max_json_mib=1,
            max_bodies_mib=1,
            arrival_seconds=0.1,
            write_seconds=0.1,
            idle_seconds=0.1,
            infer_seconds=0.1,
        )
        if self.port > 65535:
            raise InvalidArgument(f"port is {self.port}; give one from 0, any that is free, to 65535")
