"""Provides a client's connection: reads requests, runs them, and sends answers."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from honed.daemon.aio import Driven
from honed.daemon.core.queue import ClientId
from honed.daemon.settings.schema import MAX_MESSAGE_DEPTH, MAX_MESSAGE_VALUES, MAX_TEXT_BYTES, Limits
from honed.daemon.worker.shared_memory import RegionTable
from honed.protocol import strict
from honed.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    HonedError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
)
from honed.protocol.peer import (
    MAX_PENDING_DESCRIPTORS,
    Event,
    NotificationReceived,
    Peer,
    RequestReceived,
    discard_input,
    read_socket,
    write_socket,
)
from honed.protocol.strict import Map
from honed.protocol.wire import APART, FrameLimits, ProtocolError, close_all

from .access import Credentials
from .fairness import RoundRobin, Usage

R = TypeVar("R")
_log = logging.getLogger(__name__)
_MAX_UNSENT = 1 << 20  # Bytes of answers beyond which nothing more is read from a client
_ENVELOPE = 1 << 20  # Bytes of an answer beside its tensors
_LINGER_SECONDS = 2.0  # Time for a client to read why it is dropped
_GONE_SECONDS = 0.2  # Interval of checks whether a half-closed client still reads


@dataclass(frozen=True, slots=True)
class WithDescriptors(Generic[R]):
    """A result with open descriptors, which the connection closes once they are sent."""

    result: R
    descriptors: tuple[int, ...]


def as_error(method: str, failure: BaseException) -> HonedError:
    """Return the error that a client receives for a failure; a bug in one method must not end the service."""
    if isinstance(failure, HonedError):
        return failure
    _log.error("%s failed", method[:80], exc_info=failure)
    return Internal(f"the service failed in {method[:80]} ({failure!r:.200}); its log says more")


class ClientSocket:
    """A non-blocking connected socket with callbacks for when it can be read or written."""

    def __init__(
        self, connected: socket.socket, readable: Callable[[], None], writable: Callable[[], None]
    ) -> None:
        """Initialise in a running loop; the object owns the socket."""
        connected.setblocking(False)
        self.socket = connected
        self._descriptor = connected.fileno()  # Selectors look up a number faster than a socket
        self.reading = False
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._readable = readable
        self._writable = writable

    def read(self, wanted: bool) -> None:
        """Start or stop reading from the client."""
        if wanted and not self.reading:
            self._loop.add_reader(self._descriptor, self._readable)
        elif not wanted and self.reading:
            self._loop.remove_reader(self._descriptor)
        self.reading = wanted

    def write(self, wanted: bool) -> None:
        """Start or stop the callback for room to write."""
        if wanted and not self._writing:
            self._loop.add_writer(self._descriptor, self._writable)
        elif not wanted and self._writing:
            self._loop.remove_writer(self._descriptor)
        self._writing = wanted

    def is_gone(self) -> bool:
        """Return whether the client has closed its end for both directions, or does not exist any more."""
        poll = select.poll()
        poll.register(self.socket, 0)
        return bool(poll.poll(0))

    def shut_down(self) -> None:
        """Shut down writing, and continue to read; raise OSError if the client is gone."""
        self.socket.shutdown(socket.SHUT_WR)
        self.read(True)

    def close(self) -> None:
        """Close the socket, and stop both callbacks."""
        self.read(False)
        self.write(False)
        self.socket.close()


class Timer:
    """A timer with at most one pending callback, always after `seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]) -> None:
        self._loop = loop
        self.seconds = seconds
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, unless it is running."""
        if self._handle is None:
            self._handle = self._loop.call_later(self.seconds, self._fire)

    def stop(self) -> None:
        """Stop the timer, so that it does not call back."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()


Work = Coroutine[Any, Any, Any] | Driven[Any]
AnswerRequest = Callable[["Connection", RequestReceived], Work]


class Handler(Protocol):
    """The server's interface for connections."""

    # Returns the work for a request; raises HonedError if it is invalid or not permitted. The connection
    # closes the request's descriptors when the work has ended.
    answer: AnswerRequest

    def overfull(self) -> None:
        """Handle that all connections together hold too much memory."""

    def connection_closed(self, connection: Connection) -> None:
        """Handle the end of the connection; its requests are cancelled."""


class Connection:
    """A connected client, served by callbacks of the loop within limits of memory and time."""

    def __init__(
        self,
        number: int,
        connected: socket.socket,
        peer: Credentials,
        limits: Limits,
        usage: Usage,
        turns: RoundRobin,
        handler: Handler,
    ) -> None:
        """Initialise in a running loop; the connection owns the socket."""
        self.number = number
        self.peer = peer
        self.regions = RegionTable(limits.max_regions)
        self._socket = ClientSocket(connected, self._readable, self._writable)
        self._limits = limits
        self._usage = usage
        self._turns = turns
        self._owner = (peer.uid, peer.pid)
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._wire = _peer(limits)
        self._tasks: dict[int, asyncio.Task[None] | Driven[Any]] = {}  # Unanswered requests by msgid
        self._held = 0  # Bytes accounted to the peer's user
        self._to_be_read = False  # Waits for a turn to read
        self._asked = False  # Waits for a turn to handle messages
        self._half_closed = False  # The client sends no more, and may still read
        self._ending = False  # Reading has ended; the connection closes when all is sent
        self._refusal: HonedError = Cancelled("the request was cancelled")  # The answer to cancelled requests
        self._at_close: list[Callable[[], object]] = []
        self.closed = False
        self._frame_timer = Timer(self._loop, limits.message_seconds, self._too_slow)
        self._write_timer = Timer(self._loop, limits.write_seconds, self._not_reading)
        self._socket.read(True)

    @property
    def unanswered(self) -> int:
        """The number of unanswered requests."""
        return len(self._tasks)

    @property
    def client(self) -> ClientId:
        """The client's id in the queues."""
        return ClientId(self.peer.uid, self.number)

    def notify(self, method: str, params: Map) -> None:
        """Send a notification, unless the connection is ending."""
        if not self.closed and not self._ending:
            self._wire.notify(method, params)
            self._write()

    def when_closed(self, callback: Callable[[], object]) -> None:
        """Register a callback for the end of the connection."""
        self._at_close.append(callback)

    def cancel(self, msgid: object) -> None:
        """Cancel a request; ignore one that is unknown or answered."""
        task = self._tasks.get(msgid) if isinstance(msgid, int) else None
        if task is not None:
            self._cancel(task)

    def refuse_all(self, error: HonedError) -> None:
        """Cancel every unanswered request, and answer each with `error`."""
        self._refusal = error
        self._cancel_all()

    def _cancel_all(self) -> None:
        for task in self._tasks.values():
            self._cancel(task)

    def _cancel(self, task: asyncio.Task[None] | Driven[Any]) -> None:
        """Cancel a task once it has begun; one that has not would end without an answer."""
        self._loop.call_soon(task.cancel)

    def end(self, error: HonedError | None = None, msgid: int | None = None) -> None:
        """Stop reading, send the error if there is one, and close when all is sent."""
        if self.closed or self._ending:
            return
        self._ending = True
        self._wire.stop_receiving()
        self._frame_timer.stop()
        self._cancel_all()
        self._loop.call_later(_LINGER_SECONDS, self.close)
        if error is not None:
            _log.info("dropping a client of user %d: %s", self.peer.uid, error)
            self._wire.last_words(error, msgid)
            self._write()
        elif not self._wire.unsent_bytes:
            self._shut_down()

    def close(self) -> None:
        """Close the connection at once, and drop everything it holds."""
        if self.closed:
            return
        self.closed = True
        self._frame_timer.stop()
        self._write_timer.stop()
        self._cancel_all()
        # The connection awaits garbage collection; its messages are freed now, like their accounting.
        self._wire.close()
        self._wire.drop_unsent()
        self._usage.change(self.peer.uid, -self._held)
        self._held = 0
        self._socket.close()
        self._handler.connection_closed(self)
        for callback in self._at_close:
            callback()

    def _readable(self) -> None:
        """Read at this client's turn."""
        if self._to_be_read:
            return
        self._to_be_read = True
        self._turns.ask(self._owner, self._read)
        if self._to_be_read:
            self._socket.read(False)

    def _read(self) -> None:
        self._to_be_read = False
        if self.closed:
            return
        try:
            if self._ending:
                # Data that arrives after the end is dropped, so that the client can read the error.
                more = discard_input(self._socket.socket)
            else:
                more = read_socket(self._socket.socket, self._wire)
        except BlockingIOError:
            self._socket.read(True)
        except OSError:
            self.close()
        except ProtocolError as fault:
            self.end(fault.error)
        else:
            if not more and not self._ending and not self._socket.is_gone():
                self._half_close()
            elif not more:
                self.close()
            elif self._ending:
                self._socket.read(True)
            else:
                self._process()

    def _ask(self) -> None:
        """Handle the next message at this client's turn, and stop reading until then."""
        if self._asked or self.closed:
            return
        self._asked = True
        self._turns.ask(self._owner, self._process)
        if self._asked:
            self._socket.read(False)

    def _process(self) -> None:
        """Handle the next whole message in the buffer, if the client's limits allow another."""
        self._asked = False
        self._account()
        if self._ending or self.closed:
            return
        event: Event | None = None
        try:
            if not self._is_congested():
                event = self._wire.next_event()
                if event is not None:
                    self._frame_timer.stop()
                    self._handle(event)
        except ProtocolError as fault:
            self.end(fault.error, fault.msgid)
        if self._ending or self.closed:
            return
        buffered = self._wire.buffered
        if event is not None and buffered:
            self._ask()
            if self.closed:
                return
        congested = self._is_congested()
        self._socket.read(not congested and not self._asked and not self._half_closed)
        if congested or not buffered:
            self._frame_timer.stop()
        else:
            self._frame_timer.start()

    def _half_close(self) -> None:
        """Stop reading from a client that sends no more; close after its last answer, or when it is gone."""
        if self.closed or self._ending:
            return
        self._half_closed = True
        self._socket.read(False)
        if self._socket.is_gone():
            self.close()
        self._close_if_answered()
        if not self.closed:
            self._loop.call_later(_GONE_SECONDS, self._half_close)

    def _close_if_answered(self) -> None:
        """Close the connection of a client that sends no more, once its last answer is sent."""
        if self._half_closed and not self._tasks and not self._wire.unsent_bytes and not self._asked:
            self.close()

    def _is_congested(self) -> bool:
        return (
            self._wire.unanswered >= self._limits.max_unanswered
            or self._wire.unsent_bytes > _MAX_UNSENT
            or self._wire.unsent_descriptors > MAX_PENDING_DESCRIPTORS
        )

    def _handle(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            try:
                work = self._handler.answer(self, event)
            except HonedError as error:
                close_all(event.descriptors)
                self._wire.refuse(event.msgid, error)
                self._write()
                return
            if isinstance(work, Driven):
                self._tasks[event.msgid] = work
                work.begin(partial(self._answer, event))
            else:
                self._tasks[event.msgid] = self._loop.create_task(self._await(event, work))
        elif isinstance(event, NotificationReceived) and event.method == "Cancel":
            self.cancel(event.params.get("msgid"))
            self._account()
        else:
            raise ProtocolError(
                InvalidArgument("clients send requests and Cancel notifications only; send one of these")
            )

    async def _await(self, request: RequestReceived, work: Coroutine[Any, Any, Any]) -> None:
        """Do the work of a request and answer with its result or its error."""
        try:
            result = await work
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 - any error is the answer
            self._answer(request, None, error)
        else:
            self._answer(request, result, None)

    def _answer(self, request: RequestReceived, result: Any, error: BaseException | None) -> None:
        """Answer a request with a result, or the error that ended its work."""
        failure: HonedError | None = None
        attached: Sequence[int] = ()
        if isinstance(error, asyncio.CancelledError):
            failure = self._refusal
        elif error is not None:
            # The traceback would keep frames alive that refer to the message and to the error itself.
            failure = as_error(request.method, error).with_traceback(None)
        close_all(request.descriptors)
        del self._tasks[request.msgid]
        if isinstance(result, WithDescriptors):
            result, attached = result.result, result.descriptors
        if self.closed or self._ending:
            close_all(attached)
            self._wire.forget(request.msgid)
            self._account()
            return
        if failure is not None:
            self._wire.refuse(request.msgid, failure)
        else:
            plain = result if type(result) is dict else strict.to_plain(result)
            self._wire.answer(request.msgid, plain, attached)
        self._write()
        if self._wire.buffered or not self._socket.reading:
            self._ask()

    def _write(self) -> None:
        """Send what fits; wait for room if data is left, otherwise finish if the connection is ending."""
        try:
            progress = write_socket(self._socket.socket, self._wire)
        except OSError:
            self.close()
            return
        unsent = self._wire.unsent_bytes
        if progress or not unsent:
            self._write_timer.stop()
        self._socket.write(bool(unsent))
        if unsent:
            self._write_timer.start()
        elif self._ending:
            self._shut_down()
        elif self._half_closed:
            self._loop.call_soon(self._close_if_answered)
        self._account()

    def _writable(self) -> None:
        congested = self._is_congested()
        self._write()
        if congested and not self._is_congested():
            self._ask()

    def _account(self) -> None:
        """Account for the memory of the connection, and end it if its user holds too much."""
        if self.closed:
            return
        held = self._wire.held
        change = held - self._held
        if not change:
            return
        self._held = held
        within = self._usage.change(self.peer.uid, change)
        if change > 0 and self._usage.overfull:
            self._handler.overfull()
        if not within and change > 0 and not self._ending:
            self.end(
                ResourceExhausted(
                    f"user {self.peer.uid} has more than {self._limits.max_user_bytes} bytes in unanswered "
                    "requests; send fewer at a time, or use shared memory"
                )
            )

    @property
    def held(self) -> int:
        """The bytes of messages held: incoming, unanswered, and unsent answers."""
        return self._held

    def _too_slow(self) -> None:
        seconds = self._frame_timer.seconds
        self.end(DeadlineExceeded(f"the message was not complete after {seconds:g} s; send it faster"))

    def _not_reading(self) -> None:
        _log.info("dropping a client of user %d that does not read its answers", self.peer.uid)
        self.close()

    def _shut_down(self) -> None:
        """Shut down writing when all is sent; data that the client still sends is dropped."""
        try:
            self._socket.shut_down()
        except OSError:
            self.close()


def _peer(limits: Limits) -> Peer:
    """Return the service's end of the protocol, which limits the client's messages."""
    return Peer(
        serves=True,
        receiving=FrameLimits(
            max_bytes=limits.max_message_bytes,
            max_depth=MAX_MESSAGE_DEPTH,
            max_values=MAX_MESSAGE_VALUES,
            max_text=MAX_TEXT_BYTES,
        ),
        sending=FrameLimits(max_bytes=limits.max_answer_bytes + _ENVELOPE),
        large=APART,
    )
