"""Where the service is reached, and how bytes move between a socket and a `Peer`. No NumPy."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from honed.protocol.errors import HonedError, PermissionDenied, Unavailable
from honed.protocol.peer import MAX_PENDING_DESCRIPTORS, Peer
from honed.protocol.strict import Map
from honed.protocol.wire import FrameLimits, close_all

_CHUNK = 128 << 10  # bytes read at once
_ANCILLARY = socket.CMSG_LEN(MAX_PENDING_DESCRIPTORS * array.array("i").itemsize)
# As plain numbers: an operation on the enumerations of `socket` takes as long as a read.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)


def receive(connected: socket.socket, peer: Peer) -> bool:
    """Read once and have the peer take it in; False at the end of the stream.

    Raises PeerFault, and OSError: BlockingIOError where a socket that does not block has nothing.
    """
    data, descriptors, flags = _received(connected)
    peer.receive(data, descriptors, truncated=bool(flags & _TRUNCATED))
    return bool(data)


def drop(connected: socket.socket) -> bool:
    """Read once and keep nothing; False at the end of the stream. Raises OSError as `receive`."""
    data, descriptors, _ = _received(connected)
    close_all(descriptors)
    return bool(data)


def send(connected: socket.socket, peer: Peer) -> bool:
    """Write all that the peer has to send, or what a socket that does not block takes; True where any went.

    Raises OSError.
    """
    progress = False
    while (piece := peer.to_send()) is not None:
        data, descriptors = piece
        try:
            sent = socket.send_fds(connected, [data], descriptors) if descriptors else connected.send(data)
        except BlockingIOError:
            break
        peer.sent(sent)
        progress = True
    return progress


def _received(connected: socket.socket) -> tuple[bytes, list[int], int]:
    """Bytes, descriptors and flags of one read, as `socket.recv_fds`, which is slower where none came."""
    data, ancillary, flags, _ = connected.recvmsg(_CHUNK, _ANCILLARY, _CLOEXEC)
    if not ancillary:
        return data, [], flags
    descriptors = array.array("i")
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(packed[: len(packed) - len(packed) % descriptors.itemsize])
    return data, list(descriptors), flags


SYSTEM_SOCKET = "/run/honed/honed.sock"
Progress = Callable[[Map], None]
_ANSWERS = FrameLimits(max_bytes=1 << 30)
_REQUESTS = FrameLimits()


def client_peer() -> Peer:
    """A client's end of a connection to the service."""
    return Peer(serves=False, receiving=_ANSWERS, sending=_REQUESTS)


def connect(path: str, timeout: float | None) -> socket.socket:
    """A socket connected to the service; raises Unavailable or PermissionDenied where nobody answers.

    `timeout` in seconds, of this and of all that is done with the socket; None: no limit.
    """
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connecting.settimeout(timeout if timeout is None else max(timeout, 1e-3))  # 0 would never block
        connecting.connect(path)
    except OSError as error:
        connecting.close()
        raise cannot_connect(path, error) from error
    return connecting


def default_socket(environment: Mapping[str, str]) -> str:
    """Where the service listens: $HONED_SOCKET, the system's place if it is there or for root, the user's."""
    if environment.get("HONED_SOCKET"):
        return environment["HONED_SOCKET"]
    runtime_dir = environment.get("XDG_RUNTIME_DIR")
    if os.path.exists(SYSTEM_SOCKET) or not runtime_dir or os.geteuid() == 0:
        return SYSTEM_SOCKET
    return str(PurePosixPath(runtime_dir) / "honed" / "honed.sock")


def cannot_connect(path: str, error: OSError) -> HonedError:
    """The error for a socket nobody answers at."""
    if isinstance(error, PermissionError):
        return PermissionDenied(
            f"{path} may not be opened by this user; run 'sudo usermod -aG honed USER' and log in again, "
            "with -aG honed,honed-admin for one who adds and removes models"
        )
    return Unavailable(
        f"no service answers at {path} ({error.strerror}); start it with 'systemctl start honed', "
        "or 'honed' as an ordinary user"
    )


def connection_lost() -> Unavailable:
    """The error for requests whose connection went away before they were answered."""
    return Unavailable("the service closed the connection before it answered; call again, its log says why")
