"""A tuner's side of the idle lease, which says whether the device may be used now.

See docs/protocol.md, "LeaseAsk".

    with LeaseHolder(candidate_seconds=2.0) as lease:
        while lease.wait_until_granted(timeout=60.0):
            while lease.may_run():
                measure_one_candidate()  # takes 2 s at most
            lease.release()

There is no thread: `may_run` looks at the socket without waiting, which costs microseconds.
"""

from __future__ import annotations

import math
import os
import select
import socket as sockets
import time

from honed.protocol import streams
from honed.protocol.errors import DeadlineExceeded, HonedError, Internal, Unavailable
from honed.protocol.peer import Event, NotificationReceived, Peer, ResponseReceived
from honed.protocol.strict import Map
from honed.protocol.wire import ProtocolError, close_all

from . import transport
from .steps import limit_of

_RETRY_SECONDS = 1.0  # While no service answers
_LOOK_SECONDS = 3600.0  # The longest look at the socket; a poll takes no more than 24 days


class LeaseHolder:
    """One tuner's claim to the device. For one thread; a service that restarts is found again."""

    def __init__(
        self,
        candidate_seconds: float,
        *,
        socket: str | os.PathLike[str] | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        """Set up the holder, without connecting yet.

        candidate_seconds: the seconds within which the tuner leaves the device when the lease is revoked.
        socket: the service's path; None looks where honed listens. timeout: seconds the service may take for
        an answer; None, infinity, and a day or more set no limit.
        """
        self.socket = str(socket) if socket is not None else transport.default_socket(os.environ)
        self.candidate_seconds = candidate_seconds
        self.timeout = _seconds(timeout)
        self.why = "not asked yet"  # The lease is not held
        self._connected: tuple[sockets.socket, Peer] | None = None
        self._answer: ResponseReceived | None = None  # To the call under way
        self._asked = False
        self._lease = 0  # The latest granted that is not released
        self._revoked = 0  # The latest revoked; may be known before the answer that granted it

    def may_run(self) -> bool:
        """Return whether the lease is held at this moment; never wait, never raise."""
        if self._connected is not None:
            self._receive(0.0)
        return self._lease > self._revoked

    def wait_until_granted(self, timeout: float) -> bool:
        """Ask for the lease if need be and wait; False where it is not granted within `timeout` seconds.

        A lease that was revoked is released first: call this when the device is left. While no service
        answers this waits for one; `why` says so. Raises PermissionDenied, and InvalidArgument where
        candidate_seconds is more than the service allows.
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
            # Once more where the lease was granted just when it was given up.
            released = self._lease
            try:
                self._call("LeaseRelease", {"lease": released or None})
            except (Unavailable, DeadlineExceeded) as error:
                self._lose(str(error))
        self._lease, self._asked = 0, False

    def close(self) -> None:
        """Give the lease up, if it is held, by ending the connection; the device must be left before."""
        self._lose("not asked yet")

    def __enter__(self) -> LeaseHolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self) -> None:
        answer = self._call("LeaseAsk", {"candidate_seconds": self.candidate_seconds})
        self._asked = True
        self.why = str(answer.get("why", ""))
        if answer.get("granted"):
            self._lease = int(answer["lease"])

    def _call(self, method: str, params: Map) -> Map:
        """Return the result of a method; raise its error.

        Raises Unavailable where the connection is lost, and DeadlineExceeded where the service does not
        answer within the timeout.
        """
        connected, peer = self._connect()
        deadline = time.monotonic() + self.timeout
        self._answer = None
        peer.call(method, params)
        try:
            streams.send(connected, peer)
        except OSError as error:
            raise transport.connection_lost() from error
        while self._answer is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"the service did not answer within {self.timeout:g} s; see its log")
            self._receive(left)
            if self._connected is None:
                raise transport.connection_lost()
        if self._answer.error is not None:
            raise self._answer.error
        if not isinstance(self._answer.result, dict):
            raise Internal("the service answered something that is no map; compare versions")
        return self._answer.result

    def _connect(self) -> tuple[sockets.socket, Peer]:
        if self._connected is None:
            self._connected = transport.connect(self.socket, limit_of(self.timeout)), transport.client_peer()
            self._lease = self._revoked = 0  # A new service counts its leases from 1
        return self._connected

    def _receive(self, seconds: float) -> None:
        """Take in what arrives within `seconds`; return after the first of it."""
        assert self._connected is not None
        connected, peer = self._connected
        poller = select.poll()
        poller.register(connected, select.POLLIN)
        if not poller.poll(min(max(0.0, seconds), _LOOK_SECONDS) * 1000):
            return
        try:
            if not streams.receive(connected, peer):
                self._lose(str(transport.connection_lost()))
                return
            while (event := peer.next_event()) is not None:
                self._take(event)
        except OSError as error:
            self._lose(str(transport.cannot_connect(self.socket, error)))
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
                pass  # Other news is not for a tuner

    def _lose(self, why: str) -> None:
        if self._connected is not None:
            connected, peer = self._connected
            connected.close()
            peer.close()
            self._connected = None
        self._lease, self._asked, self.why = 0, False, why


def _seconds(timeout: float | None) -> float:
    """Return the timeout in seconds as a number; infinity: no limit. Raise InvalidArgument."""
    limit = limit_of(timeout)
    return math.inf if limit is None else limit
