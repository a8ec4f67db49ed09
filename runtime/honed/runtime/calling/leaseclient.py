"""A tuner's side of the idle lease, which says whether the device may be used now.

See docs/protocol.md, "LeaseAsk".

    with LeaseHolder(candidate_seconds=2.0) as lease:
        while lease.wait_until_granted(timeout=60.0):
            while lease.may_run():
                measure_one_candidate()  # takes 2 s at most
            lease.release()

There is no thread: `may_run` reads the socket without waiting, which costs microseconds.
"""

from __future__ import annotations

import math
import os
import select
import socket as sockets
import time

from honed.protocol.errors import DeadlineExceeded, HonedError, Internal, Unavailable
from honed.protocol.peer import Event, NotificationReceived, Peer, ResponseReceived, read_socket, write_socket
from honed.protocol.strict import Map
from honed.protocol.wire import Closing, ProtocolError, close_all

from . import rpc
from .rpc import limit_of

_RETRY_SECONDS = 1.0  # Seconds between attempts while no service answers
_LOOK_SECONDS = 3600.0  # Longest poll of the socket in seconds; poll allows at most 24 days


class LeaseHolder(Closing):
    """A tuner's claim to the device, for use by one thread; it reconnects after a restart of the service."""

    def __init__(
        self,
        candidate_seconds: float,
        *,
        socket: str | os.PathLike[str] | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        """Set up the holder, without connecting yet.

        candidate_seconds: the seconds within which the tuner leaves the device when the lease is revoked.
        socket: the service's path; None: honed's own. timeout: seconds that the service may take to answer;
        None, infinity, and a day or more set no limit.
        """
        self.socket = str(socket) if socket is not None else rpc.default_socket(os.environ)
        self.candidate_seconds = candidate_seconds
        self.timeout = _seconds(timeout)
        self.why = "not asked yet"  # Reason that the lease is not held
        self._connected: tuple[sockets.socket, Peer] | None = None
        self._answer: ResponseReceived | None = None  # The answer to the call in progress
        self._asked = False
        self._lease = 0  # Number of the latest lease granted and not released
        self._revoked = 0  # Number of the latest lease revoked, perhaps before its grant was answered

    def may_run(self) -> bool:
        """Return whether the lease is held at this moment; never wait, never raise."""
        if self._connected is not None:
            self._receive(0.0)
        return self._lease > self._revoked

    def wait_until_granted(self, timeout: float) -> bool:
        """Ask for the lease if need be, and wait; return whether it was granted within `timeout` seconds.

        Releases a revoked lease first: call this after leaving the device. While no service answers, waits
        for one, and `why` says so. Raises PermissionDenied, and InvalidArgument if candidate_seconds is more
        than the service allows.
        """
        deadline = time.monotonic() + _seconds(timeout)
        while not self.may_run():
            left = deadline - time.monotonic()
            try:
                if self._lease:
                    self.release()
                if not self._asked:
                    self._ask()
                    continue
            except (Unavailable, DeadlineExceeded) as error:
                self._lose(str(error))
                if left > 0:
                    time.sleep(min(left, _RETRY_SECONDS))
            if left <= 0:
                return False
            if self._connected is not None:
                self._receive(left)
        return True

    def release(self) -> None:
        """Release the device and stop asking for the lease; do nothing without a connection."""
        released = -1
        while self._connected is not None and self._asked and released != self._lease:
            # Repeat if the lease was granted just as it was released.
            released = self._lease
            try:
                self._call("LeaseRelease", {"lease": released or None})
            except (Unavailable, DeadlineExceeded) as error:
                self._lose(str(error))
        self._lease, self._asked = 0, False

    def close(self) -> None:
        """Give up the lease, if held, by closing the connection; leave the device before."""
        self._lose("not asked yet")

    def _ask(self) -> None:
        answer = self._call("LeaseAsk", {"candidate_seconds": self.candidate_seconds})
        self._asked = True
        self.why = str(answer.get("why", ""))
        if answer.get("granted"):
            self._lease = int(answer["lease"])

    def _call(self, method: str, params: Map) -> Map:
        """Return the result of a method; raise its error.

        Raises Unavailable if the connection is lost, and DeadlineExceeded if the service does not answer
        within the timeout.
        """
        connected, peer = self._connect()
        deadline = time.monotonic() + self.timeout
        self._answer = None
        peer.call(method, params)
        try:
            write_socket(connected, peer)
        except OSError as error:
            raise rpc.connection_lost() from error
        while self._answer is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"the service did not answer within {self.timeout:g} s; see its log")
            self._receive(left)
            if self._connected is None:
                raise rpc.connection_lost()
        if self._answer.error is not None:
            raise self._answer.error
        if not isinstance(self._answer.result, dict):
            raise Internal("the service answered something that is no map; compare versions")
        return self._answer.result

    def _connect(self) -> tuple[sockets.socket, Peer]:
        if self._connected is None:
            self._connected = rpc.connect(self.socket, limit_of(self.timeout)), rpc.client_peer()
            self._lease = self._revoked = 0  # A new service counts its leases from 1
        return self._connected

    def _receive(self, seconds: float) -> None:
        """Handle the messages of one read; return without any if none arrives within `seconds`."""
        assert self._connected is not None
        connected, peer = self._connected
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        if not poller.poll(min(max(0.0, seconds), _LOOK_SECONDS) * 1000):
            return
        try:
            if not read_socket(connected, peer):
                self._lose(str(rpc.connection_lost()))
                return
            while (event := peer.next_event()) is not None:
                self._take(event)
        except OSError as error:
            self._lose(str(rpc.cannot_connect(self.socket, error)))
        except (ProtocolError, HonedError, KeyError, TypeError, ValueError) as error:
            self._lose(f"the service said something that makes no sense ({error}); compare versions")

    def _take(self, event: Event) -> None:
        match event:
            case ResponseReceived():
                close_all(event.descriptors)
                self._answer = event  # There is one call at a time
            case NotificationReceived(method="LeaseGranted", params=params):
                self._lease, self.why = int(params["lease"]), ""
            case NotificationReceived(method="LeaseRevoked", params=params):
                self._revoked, self.why = max(self._revoked, int(params["lease"])), str(params["why"])
            case _:
                pass  # Other notifications are not for a tuner

    def _lose(self, why: str) -> None:
        if self._connected is not None:
            connected, peer = self._connected
            connected.close()
            peer.close()
            self._connected = None
        self._lease, self._asked, self.why = 0, False, why


def _seconds(timeout: float | None) -> float:
    """Return the timeout in seconds, infinity for no limit; raise InvalidArgument."""
    limit = limit_of(timeout)
    return math.inf if limit is None else limit
