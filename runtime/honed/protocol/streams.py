"""Moves bytes and descriptors between a socket and a `Peer`, blocking or not.

Separate from `aiolink`, as clients, workers and other children need no asyncio.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Callable

from .peer import MAX_PENDING_DESCRIPTORS, Peer
from .strict import Map
from .wire import close_all

Progress = Callable[[Map], None]  # Called with the Progress maps of a call in flight

_CHUNK = 64 << 10  # Bytes of one read: a larger buffer would be mapped for each read
_ANCILLARY = socket.CMSG_LEN(MAX_PENDING_DESCRIPTORS * array.array("i").itemsize)
# Plain numbers: an operation on the enumerations of `socket` takes as long as a read.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)


def receive(connected: socket.socket, peer: Peer) -> bool:
    """Read once and pass the data to the peer; return False at the end of the stream.

    Raises ProtocolError, and OSError: BlockingIOError if a non-blocking socket has no data.
    """
    data, descriptors, flags = _receive(connected)
    peer.receive(data, descriptors, truncated=bool(flags & _TRUNCATED))
    return bool(data)


def drop(connected: socket.socket) -> bool:
    """Read once and discard the data; return False at the end of the stream.

    Raise OSError as `receive` does.
    """
    data, descriptors, _ = _receive(connected)
    close_all(descriptors)
    return bool(data)


def send(connected: socket.socket, peer: Peer) -> bool:
    """Write all that the peer has to send, or what a non-blocking socket accepts; return whether it sent any.

    Raises OSError.
    """
    progress = False
    while peer.unsent_bytes and (piece := peer.to_send()) is not None:
        data, descriptors = piece
        try:
            sent = socket.send_fds(connected, [data], descriptors) if descriptors else connected.send(data)
        except BlockingIOError:
            break
        peer.record_sent(sent)
        progress = True
    return progress


def _receive(connected: socket.socket) -> tuple[bytes, list[int], int]:
    """Return bytes, descriptors and flags of one read.

    Does what `socket.recv_fds` does, but faster if no descriptors arrived.
    """
    data, ancillary, flags, _ = connected.recvmsg(_CHUNK, _ANCILLARY, _CLOEXEC)
    if not ancillary:
        return data, [], flags
    descriptors = array.array("i")
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(packed[: len(packed) - len(packed) % descriptors.itemsize])
    return data, list(descriptors), flags
