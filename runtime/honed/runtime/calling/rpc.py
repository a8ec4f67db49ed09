"""A client's calls of the service, the socket that they go through, and the errors if none answers.

Operations yield these calls: `Client` performs them in the calling thread, `AsyncClient` awaits them. Leases,
too, use this module, which does not need NumPy.
"""

from __future__ import annotations

import enum
import math
import os
import socket
import struct
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar

from honed.protocol import strict
from honed.protocol.errors import (
    DeadlineExceeded,
    HonedError,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from honed.protocol.methods import MAX_TIMEOUT_US, Method
from honed.protocol.peer import Peer, Progress, ResponseReceived
from honed.protocol.strict import Map
from honed.protocol.wire import FrameLimits, close_all

SYSTEM_SOCKET = "/run/honed/honed.sock"
_TIMEVAL = struct.Struct("ll")  # Fields of struct timeval
_ANSWERS = FrameLimits(max_bytes=1 << 30, max_depth=512)
_REQUESTS = FrameLimits()
_MOST_SECONDS: Final = MAX_TIMEOUT_US / 1e6
T = TypeVar("T")


class Usual(enum.Enum):
    """The default timeout: the client's own."""

    USUAL = enum.auto()


USUAL: Final = Usual.USUAL


def limit_of(timeout: float | None) -> float | None:
    """Return the seconds until a call is given up; None (no limit) for None, infinity and a day or more.

    Raises InvalidArgument for what is no number of at least 0.
    """
    if timeout is None:
        return None
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = math.nan
    except OverflowError:  # An int beyond the range of floats
        seconds = math.inf if timeout > 0 else -math.inf
    if not seconds >= 0 or isinstance(timeout, str | bytes):
        raise InvalidArgument(
            f"timeout is {timeout!r:.40}; give seconds, 0 or more, or infinity for no limit"
        )
    return seconds if seconds < _MOST_SECONDS else None


@dataclass(slots=True)
class Reply:
    """The untyped result of a call, and the descriptors received with it, which the operation closes."""

    result: Map
    descriptors: list[int]


@dataclass(slots=True)
class RpcRequest:
    """A call to make. `timeout` in seconds, None: no limit; the operation keeps and closes the descriptors.

    `params` are the method's, typed or as a map for the wire.
    """

    method: Method[Any, Any]
    params: Any
    timeout: float | Usual | None = USUAL
    descriptors: Sequence[int] = ()
    progress: Progress | None = None

    def limit(self, usual: float | None) -> float | None:
        """Return the seconds until the call is given up; `usual` are the client's. Raise InvalidArgument."""
        return limit_of(usual if isinstance(self.timeout, Usual) else self.timeout)

    def plain(self) -> Map:
        """Return the parameters as a map for the wire."""
        if type(self.params) is dict:
            return self.params
        plain: Map = strict.to_plain(self.params, omit_defaults=True)
        return plain

    def reply_of(self, answered: ResponseReceived) -> Reply:
        """Return the answer as a reply, and close descriptors that the method does not return.

        Raises InvalidArgument if the answer is no map.
        """
        descriptors = answered.descriptors
        if not self.method.returns_descriptors or not isinstance(answered.result, dict):
            close_all(descriptors)
            descriptors = []
        if not isinstance(answered.result, dict):
            raise InvalidArgument("the service answered something that is no map; compare versions")
        return Reply(answered.result, descriptors)


RpcSteps = Generator[RpcRequest, Reply, T]  # The calls of an operation, and the answers it receives


def client_peer() -> Peer:
    """Return a client's end of a connection to the service."""
    return Peer(serves=False, receiving=_ANSWERS, sending=_REQUESTS)


def connect(path: str, timeout: float | None) -> socket.socket:
    """Return a socket connected to the service; raise Unavailable or PermissionDenied if it cannot connect.

    `timeout` is in seconds, for connecting and for each later write, which then raises BlockingIOError; None:
    no limit.
    """
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if timeout is not None:  # The kernel's limit; Python's would poll before each operation
            micros = max(1000, round(timeout * 1e6))  # 0 would set no limit
            limit = _TIMEVAL.pack(*divmod(micros, 1_000_000))
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connecting.connect(path)
    except OSError as error:
        connecting.close()
        raise cannot_connect(path, error) from error
    return connecting


def default_socket(environment: Mapping[str, str]) -> str:
    """Return the path where the service listens.

    It is $HONED_SOCKET if set; else the system's if that exists, for root, or without $XDG_RUNTIME_DIR; else
    the user's.
    """
    if environment.get("HONED_SOCKET"):
        return environment["HONED_SOCKET"]
    runtime_dir = environment.get("XDG_RUNTIME_DIR")
    if os.path.exists(SYSTEM_SOCKET) or not runtime_dir or os.geteuid() == 0:
        return SYSTEM_SOCKET
    return str(PurePosixPath(runtime_dir) / "honed" / "honed.sock")


def cannot_connect(path: str, error: OSError) -> HonedError:
    """Return the error for a socket that refused the connection with `error`."""
    if isinstance(error, PermissionError):
        return PermissionDenied(
            f"{path} may not be opened by this user; run 'sudo usermod -aG honed USER' and log in again, "
            "with -aG honed,honed-admin for one who adds and removes models"
        )
    return Unavailable(
        f"no service answers at {path} ({error.strerror}); start it with 'systemctl start honed', "
        "or 'honed' as an ordinary user"
    )


def no_answer() -> DeadlineExceeded:
    """Return the error for a request that was not answered within its time limit."""
    return DeadlineExceeded("the service did not answer in time; give a longer timeout")


def connection_lost() -> Unavailable:
    """Return the error for requests whose connection closed before they were answered."""
    return Unavailable("the service closed the connection before it answered; call again, its log says why")
