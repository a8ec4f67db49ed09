"""The client for apps: calls models of the machine's service like functions.

    from honed.runtime import Client
    with Client() as client:
        out = client.infer("lightglue", {"kpts0": a, "kpts1": b})

Needs NumPy and msgpack only.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from honed.protocol.errors import DeadlineExceeded, HonedError, Unavailable, error_from_map
from honed.protocol.peer import Event, NotificationReceived, ResponseReceived, read_socket, write_socket
from honed.protocol.strict import Map
from honed.protocol.wire import Closing, ProtocolError, close_all

from .calling import rpc
from .calling.calls import register, unregister
from .calling.operations import Operations, SequenceBase
from .calling.rpc import Reply, RpcRequest, RpcSteps, T, limit_of
from .calling.shared_memory import Region


def _performing(steps: Callable[..., RpcSteps[T]]) -> Callable[..., T]:
    """Return a method that performs an operation's steps in the calling thread."""

    def method(self: Client, *args: Any, **kwargs: Any) -> T:
        taken = steps(self, *args, **kwargs)
        try:
            ask = next(taken)
            while True:
                try:
                    answer = self._exchange(ask)
                except BaseException as error:  # noqa: BLE001 - the operation has things to close
                    ask = taken.throw(error)
                else:
                    ask = taken.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    return method


class Client(Operations, Closing, performing=_performing):
    """A connection to the service, which threads may share, and which reconnects after a restart.

    Every method raises the errors of `honed.runtime.errors` that the service answers with, and Unavailable if
    no service answers. docs/protocol.md describes the maps that methods return.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout: float | None = 60.0,
    ) -> None:
        """Set up the client, as `InferenceBase` does."""
        super().__init__(socket, timeout=timeout)
        self._lock = threading.Lock()
        self._link: SocketLink | None = None

    @contextmanager
    def region(self, nbytes: int) -> Iterator[Region]:
        """Yield shared memory of `nbytes` bytes for the arrays of `infer`; see `Region.array`."""
        with self._lock:
            region = self._new_region(nbytes)
        try:
            self._perform(self._ensure_link(), register(region))
            with self._lock:
                self._regions[region.name] = region
            yield region
        finally:
            with self._lock:
                known = self._regions.pop(region.name, None)
            if known is not None:
                self._unregister(region)
            region.close()

    def sequence(self, model: str) -> RequestSequence:
        """Return a sequence of requests to `model`, whose state the service keeps between them."""
        return RequestSequence(self, model)

    def close(self) -> None:
        """End the connection; a later call opens a new one."""
        with self._lock:
            link, self._link = self._link, None
        self._forget_scratch()
        if link is not None:
            link.close()

    def _exchange(self, ask: RpcRequest) -> Reply:
        """Make a call and wait for its answer, on the present connection or a new one."""
        link = self._ensure_link()
        try:
            return self._perform(link, ask)
        except _NotSent:
            # The service closed the connection before it had the whole request, so sending it again is safe.
            self._drop(link)
            return self._perform(self._ensure_link(), ask)

    def _perform(self, link: SocketLink, ask: RpcRequest) -> Reply:
        limit = ask.limit(self.timeout)
        deadline = None if limit is None else time.monotonic() + limit
        try:
            waiting = link.send(ask.method.name, ask.plain(), ask.descriptors)
        except Unavailable as error:
            raise _NotSent(str(error)) from error
        while True:
            news = link.wait(waiting, deadline)
            if isinstance(news, ResponseReceived):
                return ask.reply_of(news)
            if ask.progress is not None:
                try:
                    ask.progress(news)
                except BaseException:
                    link.cancel(waiting)
                    raise

    def _ensure_link(self) -> SocketLink:
        """Return a usable connection that knows this client's regions; connect again if need be."""
        with self._lock:
            if self._link is not None and self._link.usable():
                return self._link
            if self._link is not None:
                self._link.close()
            self._link = None
            link = SocketLink(self.socket, limit_of(self.timeout))
            try:
                for region in list(self._regions.values()):
                    self._perform(link, register(region))
            except BaseException:
                link.close()
                raise
            self._link = link
            return link

    def _drop(self, link: SocketLink) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
        link.close()

    def _unregister(self, region: Region) -> None:
        with self._lock:
            link = self._link
        if link is None or not link.usable():
            return  # The service forgets regions with their connection
        try:
            self._perform(link, unregister(region))
        except Unavailable:
            self._drop(link)


class RequestSequence(SequenceBase, Closing, performing=_performing):
    """A sequence of a `Client`; its requests run one after the other, in the order in which they are sent."""


class _NotSent(Unavailable):
    """Raised when the service did not receive the whole request, so that it has not run."""


class PendingCall:
    """A request that waits for its answer, with the progress, answer or error received for it."""

    __slots__ = ("answer", "error", "msgid", "news")

    def __init__(self, msgid: int) -> None:
        self.msgid = msgid
        self.news: deque[Map] = deque()  # Progress not yet passed on
        self.answer: ResponseReceived | None = None  # The receiver closes its descriptors
        self.error: HonedError | None = None

    @property
    def woken(self) -> bool:
        """Return whether the waiting thread has progress, an answer or an error to handle."""
        return bool(self.news) or self.answer is not None or self.error is not None


class SocketLink:
    """A connected socket that several threads use.

    One waiting thread reads for all, so a lone thread pays nothing.
    """

    def __init__(self, path: str, send_timeout: float | None) -> None:
        """Connect to the service, or raise Unavailable; `send_timeout` is in seconds, None: no limit."""
        self._socket = rpc.connect(path, send_timeout)
        self._news = select.poll()  # Polls the socket for input; one thread at a time uses it
        self._news.register(self._socket, select.POLLIN)
        self._peer = rpc.client_peer()
        self._sending = threading.Lock()  # Guards sending; acquired before `_lock`
        self._lock = threading.RLock()  # Guards receiving, and the state of waiting threads
        self._changed = threading.Condition(self._lock)  # Signalled when that state changes
        self._reading = False
        self._waiting: dict[int, PendingCall] = {}
        self._broken: HonedError | None = None

    def usable(self) -> bool:
        """Return whether the connection is up, as far as can be seen without sending."""
        with self._lock:
            if self._broken is not None or self._reading or self._waiting:
                return self._broken is None
            return not self._news.poll(0)  # Without a request, input means the end

    def send(self, method: str, params: Map, descriptors: Sequence[int]) -> PendingCall:
        """Send a request. Raises Unavailable if the service is gone; the request has then not run."""
        with self._sending:
            with self._lock:
                if self._broken is not None:
                    raise self._broken
                waiting = PendingCall(self._peer.call(method, params, descriptors))
                self._waiting[waiting.msgid] = waiting
            try:
                self._flush()
            except BaseException as error:
                # Part of the frame may be sent, so the connection is useless.
                lost = rpc.connection_lost()
                self._fail(lost)
                if isinstance(error, OSError):
                    raise lost from error
                raise
        return waiting

    def wait(self, waiting: PendingCall, deadline: float | None) -> Map | ResponseReceived:
        """Return the next progress of the request, or its answer; raise its error.

        `deadline` is in time.monotonic's seconds. When it passes, or on Ctrl-C, the request is cancelled.
        """
        try:
            while True:
                with self._lock:
                    while self._reading and not waiting.woken:
                        self._changed.wait(_remaining_seconds(deadline))
                    if waiting.woken:
                        return self._take_reply(waiting)
                    self._reading = True
                self._read_for_all(deadline)
        except (DeadlineExceeded, KeyboardInterrupt):
            self.cancel(waiting)
            raise

    def cancel(self, waiting: PendingCall) -> None:
        """Give up a request and close descriptors of an answer that arrived already."""
        with self._sending:
            with self._lock:
                if waiting.answer is not None:
                    close_all(waiting.answer.descriptors)
                    waiting.answer = None
                self._waiting.pop(waiting.msgid, None)
                if self._broken is not None:
                    return
                self._peer.cancel(waiting.msgid)
            try:
                self._flush()
            except OSError:
                self._fail(rpc.connection_lost())

    def _flush(self) -> None:
        """Send what is unsent; raise OSError if the service accepts nothing within the limit of a write."""
        write_socket(self._socket, self._peer)
        if self._peer.unsent_bytes:
            raise TimeoutError

    def close(self) -> None:
        """End the connection; waiting threads get Unavailable."""
        self._fail(rpc.connection_lost())
        with self._sending:
            self._socket.close()

    def _take_reply(self, waiting: PendingCall) -> Map | ResponseReceived:
        if waiting.news:
            return waiting.news.popleft()
        self._waiting.pop(waiting.msgid, None)
        if waiting.answer is None:
            raise waiting.error or rpc.connection_lost()
        if waiting.answer.error is not None:
            raise waiting.answer.error
        return waiting.answer

    def _read_for_all(self, deadline: float | None) -> None:
        try:
            left = _remaining_seconds(deadline)
            if self._news.poll(None if left is None else left * 1000):
                self._receive()
        except OSError:
            self._fail(rpc.connection_lost())
        except ProtocolError as fault:
            self._fail(fault.error)
        except DeadlineExceeded:
            raise
        except BaseException:
            # Ctrl-C may have interrupted between reading and delivering: answers could be lost.
            self._fail(rpc.connection_lost())
            raise
        finally:
            with self._lock:
                self._reading = False
                if self._broken is not None:
                    self._peer.close()
                self._changed.notify_all()

    def _receive(self) -> None:
        """Deliver the messages of one read; raise OSError at the end of the stream."""
        with self._lock:
            if not read_socket(self._socket, self._peer):
                raise ConnectionResetError
            while (event := self._peer.next_event()) is not None:
                self._deliver(event)

    def _deliver(self, event: Event) -> None:
        match event:
            case ResponseReceived(msgid=msgid) if msgid in self._waiting:
                self._waiting[msgid].answer = event
            case ResponseReceived(descriptors=descriptors):
                close_all(descriptors)  # The link was closed meanwhile
            case NotificationReceived(method="Progress", params=params):
                waiting = self._waiting.get(params.get("msgid", -1))
                if waiting is not None:
                    waiting.news.append(params)
            case NotificationReceived(method="Error", params=params):
                raise ProtocolError(error_from_map(params))
            case _:
                pass  # Notifications for other kinds of clients

    def _fail(self, error: HonedError) -> None:
        with self._lock:
            self._broken = self._broken or error
            for waiting in self._waiting.values():
                waiting.error = waiting.error or self._broken
            self._waiting.clear()
            if not self._reading:
                self._peer.close()
            self._changed.notify_all()


def _remaining_seconds(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise rpc.no_answer()
    return left
