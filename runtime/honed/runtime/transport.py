"""Moves bytes and descriptors between a socket and a `Peer`, whatever waits for the socket."""

from __future__ import annotations

import contextlib
import socket

from honed.protocol.arrivals import close_all
from honed.protocol.peer import MAX_PENDING_DESCRIPTORS, Peer

_CHUNK = 128 << 10  # bytes read at once


def receive(connected: socket.socket, peer: Peer) -> bool:
    """Read once and have the peer take it in; False at the end of the stream.

    Raises PeerFault, and OSError: BlockingIOError where a socket that does not block has nothing.
    """
    data, descriptors, flags, _ = socket.recv_fds(
        connected, _CHUNK, MAX_PENDING_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    peer.receive(data, descriptors, truncated=bool(flags & socket.MSG_CTRUNC))
    return bool(data)


def drop(connected: socket.socket) -> bool:
    """Read once and keep nothing; False at the end of the stream. Raises OSError as `receive`."""
    data, descriptors, _, _ = socket.recv_fds(
        connected, _CHUNK, MAX_PENDING_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    close_all(descriptors)
    return bool(data)


def send(connected: socket.socket, peer: Peer) -> bool:
    """Write all that the peer has to send, or what a socket that does not block takes; True where any went.

    Raises OSError.
    """
    progress = False
    with contextlib.suppress(BlockingIOError):
        while (piece := peer.to_send()) is not None:
            data, descriptors = piece
            peer.sent(
                socket.send_fds(connected, [data], descriptors) if descriptors else connected.send(data)
            )
            progress = True
    return progress
