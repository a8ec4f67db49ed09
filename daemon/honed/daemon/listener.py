"""The listening socket, which accepts clients."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from honed.protocol.errors import AlreadyExists, HonedError, PermissionDenied, ResourceExhausted, error_to_map
from honed.protocol.wire import Notification, encode

from .core.queue import service_stops
from .serving.pool import EngineManager
from .settings.schema import Limits
from .transport.access import Credentials, identify
from .transport.connection import AnswerRequest, Connection
from .transport.fairness import RoundRobin, Usage

_BACKLOG = 128
_ACCEPT_PAUSE = 0.1  # Seconds, after running out of descriptors
_CLOSE_SECONDS = 2.0  # Time for clients to receive their last answers
_log = logging.getLogger(__name__)


def listen(path: Path) -> socket.socket:
    """Return a listening socket at `path`, replacing a stale one; the caller holds the lock on the place.

    All users may connect: permissions are checked for each request, so that a refusal can say why. Raises
    PermissionDenied or AlreadyExists where the place cannot be used.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise AlreadyExists(
                    f"{path} is there and is no socket; remove it, or choose another --socket"
                )
            path.unlink()
        mask = os.umask(0o111)  # A later chmod would leave a moment in which clients are refused
        try:
            listening.bind(str(path))
        finally:
            os.umask(mask)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise PermissionDenied(
            f"{path} cannot be listened at ({error.strerror or error}); choose another place with --socket"
        ) from error
    except HonedError:
        listening.close()
        raise
    return listening


class SocketServer:
    """A server that accepts connections until it is stopped. `answer` is set before it begins."""

    answer: AnswerRequest

    def __init__(self, listening: socket.socket, limits: Limits, pool: EngineManager) -> None:
        self._listening = listening
        self._limits = limits
        self._pool = pool
        self._bytes = Usage(limits.max_user_bytes, limits.max_all_bytes)
        self._by_user = Usage(limits.max_user_connections)
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._turns = RoundRobin(self._loop)
        self._accepting = False

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self._connections)

    def limits_changed(self) -> None:
        """Apply changed limits; connected clients stay."""
        self._bytes.limit = self._limits.max_user_bytes
        self._bytes.in_all = self._limits.max_all_bytes
        self._by_user.limit = self._limits.max_user_connections

    def start_accepting(self) -> None:
        """Accept clients from now on."""
        self._accepting = True
        self._loop.add_reader(self._listening, self._accept)

    def stop_accepting(self) -> None:
        """Accept no more clients; those connected stay."""
        self._accepting = False
        self._loop.remove_reader(self._listening)

    def _accept_again(self) -> None:
        if self._accepting:
            self.start_accepting()

    async def close(self) -> None:
        """Refuse unanswered requests, and end every connection once its answers are sent."""
        for connection in self._connections.values():
            connection.refuse_all(service_stops())
        await self._until(lambda: not any(c.unanswered for c in self._connections.values()))
        for connection in list(self._connections.values()):
            connection.end()
        await self._until(lambda: not self._connections)
        for connection in list(self._connections.values()):
            connection.close()
        self._listening.close()

    async def _until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`, for _CLOSE_SECONDS at most."""
        end = self._loop.time() + _CLOSE_SECONDS
        while not done() and self._loop.time() < end:
            await asyncio.sleep(0.01)

    def overfull(self) -> None:
        """Close the largest connection of the user that holds most, as all together hold too much."""
        user = self._bytes.largest
        largest = max(
            (c for c in self._connections.values() if c.peer.uid == user), key=lambda c: c.held, default=None
        )
        if largest is not None:
            _log.warning("all messages take more than max_all_bytes; dropping a client of user %d", user)
            largest.close()

    def connection_closed(self, connection: Connection) -> None:
        """Forget a connection that was closed, and release its regions."""
        for region in connection.regions.remove(None):
            self._pool.requests.release(region)
        self._pool.forget_client(connection.client)
        self._by_user.change(connection.peer.uid, -1)
        del self._connections[connection.number]

    def _accept(self) -> None:
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            _log.error("no more clients can be accepted for now: %s", error)
            self._loop.remove_reader(self._listening)
            self._loop.call_later(_ACCEPT_PAUSE, self._accept_again)
            return
        try:
            peer = identify(connected)
        except OSError as error:
            _log.warning("a client without credentials was dropped: %s", error)
            connected.close()
            return
        self._admit(connected, peer)

    def _admit(self, connected: socket.socket, peer: Credentials) -> None:
        within = self._by_user.change(peer.uid, 1)
        if not within or len(self._connections) >= self._limits.max_connections:
            self._by_user.change(peer.uid, -1)
            error = ResourceExhausted("too many clients are connected; close connections that are not used")
            _refuse(connected, error)
            return
        number = next(self._numbers)
        self._connections[number] = Connection(
            number, connected, peer, self._limits, self._bytes, self._turns, self
        )


def _refuse(connected: socket.socket, error: HonedError) -> None:
    with connected, contextlib.suppress(OSError):  # The client may be gone
        connected.setblocking(False)
        connected.send(encode(Notification(method="Error", params=error_to_map(error))))
