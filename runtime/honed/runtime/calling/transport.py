"""Finds and connects to the service's socket, and words the errors if it cannot. Does not need NumPy."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from pathlib import PurePosixPath

from honed.protocol.errors import DeadlineExceeded, HonedError, PermissionDenied, Unavailable
from honed.protocol.peer import Peer
from honed.protocol.wire import FrameLimits

SYSTEM_SOCKET = "/run/honed/honed.sock"
_TIMEVAL = struct.Struct("ll")  # Fields of struct timeval
_ANSWERS = FrameLimits(max_bytes=1 << 30, max_depth=512)
_REQUESTS = FrameLimits()


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
