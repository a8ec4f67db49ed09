"""A connection to a MessagePack-RPC peer in an asyncio loop, for clients and for the service's workers."""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Callable, Sequence
from functools import partial

from .errors import HonedError, error_from_map
from .peer import Event, NotificationReceived, Peer, Progress, ResponseReceived, read_socket, write_socket
from .strict import Map
from .wire import ProtocolError, close_all

OnAnswer = Callable[
    [ResponseReceived | Exception], None
]  # Called with the answer to a call, or with the error


class AsyncLink:
    """A connection within one event loop: any number of calls in flight, with answers in any order."""

    def __init__(self, connected: sockets.socket, peer: Peer, lost: Callable[[], HonedError]) -> None:
        """Take over a connected socket, in a running loop; `lost` returns the error for unanswered calls."""
        connected.setblocking(False)
        self._socket = connected
        self._peer = peer
        self._lost = lost
        self._waiting: dict[int, OnAnswer] = {}
        self._progress: dict[int, Progress] = {}
        self.broken: HonedError | None = None
        self._loop = asyncio.get_running_loop()
        self._to_be_written = False  # The socket's buffer is full, and the loop waits for it
        self._loop.add_reader(connected, self._readable)

    async def exchange(
        self,
        method: str,
        params: Map,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> ResponseReceived:
        """Return the answer to a call, whose descriptors the caller then closes; raise the error in it.

        Cancelling the awaiting task cancels the request.
        """
        coming = self.begin(method, params, descriptors, progress)
        try:
            return await coming
        except BaseException:
            if coming.done() and not coming.cancelled() and coming.exception() is None:
                close_all(coming.result().descriptors)  # The answer arrived just before
            raise

    def begin(
        self,
        method: str,
        params: Map,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> asyncio.Future[ResponseReceived]:
        """Make a call; return a future of its answer or error, whose cancellation cancels the request.

        Raises the error that the connection failed with.
        """
        coming: asyncio.Future[ResponseReceived] = self._loop.create_future()
        msgid = self.ask(method, params, partial(_settle, coming), descriptors, progress)
        coming.add_done_callback(partial(self._over, msgid))
        return coming

    def ask(
        self,
        method: str,
        params: Map,
        on_answer: OnAnswer,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> int:
        """Make a call, and call `on_answer` once with its outcome, perhaps before this returns.

        Returns the call's number. Raises the error that the connection failed with.
        """
        if self.broken is not None:
            raise self.broken
        msgid = self._peer.call(method, params, descriptors)
        self._waiting[msgid] = on_answer
        if progress is not None:
            self._progress[msgid] = progress
        self._write()
        return msgid

    def _over(self, msgid: int, _: asyncio.Future[ResponseReceived]) -> None:
        """Forget a call whose future is done, and cancel it if it is unanswered."""
        self._forget_call(msgid)
        if self.broken is None and self._peer.awaits(msgid):
            self._peer.cancel(msgid)
            self._write()

    def notify(self, method: str, params: Map) -> None:
        """Send a notification, now or when the socket allows."""
        self._peer.notify(method, params)
        self._write()

    def usable(self) -> bool:
        """Return whether the connection is up; notice an end that the loop has not seen yet."""
        if self.broken is None:
            try:
                if not self._socket.recv(1, sockets.MSG_PEEK | sockets.MSG_DONTWAIT):
                    self.fail(self._lost())
            except BlockingIOError:
                pass  # Up, as there is no input
            except OSError:
                self.fail(self._lost())
        return self.broken is None

    def fail(self, error: HonedError) -> None:
        """End the connection; all unanswered calls get `error`."""
        if self.broken is not None:
            return
        self.broken = error
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._peer.close()
        for msgid in list(self._waiting):
            if (on_answer := self._forget_call(msgid)) is not None:
                on_answer(error)

    def _forget_call(self, msgid: int) -> OnAnswer | None:
        """Forget a call, and return its callback; None if it is not waiting."""
        self._progress.pop(msgid, None)
        return self._waiting.pop(msgid, None)

    def _write(self) -> None:
        """Send as much as the socket accepts, and the rest when it accepts more."""
        try:
            write_socket(self._socket, self._peer)
        except OSError:
            self.fail(self._lost())
            return
        unsent = bool(self._peer.unsent_bytes)
        if unsent and not self._to_be_written:
            self._loop.add_writer(self._socket, self._write)
        elif self._to_be_written and not unsent:
            self._loop.remove_writer(self._socket)
        self._to_be_written = unsent

    def _readable(self) -> None:
        try:
            if not read_socket(self._socket, self._peer):
                raise ConnectionResetError
            while self.broken is None and (event := self._peer.next_event()) is not None:
                self._deliver(event)
        except BlockingIOError:
            return
        except OSError:
            self.fail(self._lost())
        except ProtocolError as fault:
            self.fail(fault.error)

    def _deliver(self, event: Event) -> None:
        match event:
            case ResponseReceived(msgid=msgid, error=error, descriptors=descriptors):
                on_answer = self._forget_call(msgid)
                if on_answer is None or error is not None:
                    close_all(descriptors)
                if on_answer is not None:
                    on_answer(event if error is None else error)
            case NotificationReceived(method="Progress", params=params):
                self._show_progress(params)
            case NotificationReceived(method="Error", params=params):
                raise ProtocolError(error_from_map(params))

    def _show_progress(self, params: Map) -> None:
        msgid = params.get("msgid", -1)
        progress = self._progress.get(msgid)
        if progress is None:
            return
        try:
            progress(params)
        except Exception as error:  # noqa: BLE001 - it is the caller's own, and raised from its call
            if (on_answer := self._forget_call(msgid)) is not None:
                on_answer(error)


def _settle(coming: asyncio.Future[ResponseReceived], answered: ResponseReceived | Exception) -> None:
    """Set the result of a call's future, unless the future was cancelled just before."""
    if isinstance(answered, ResponseReceived):
        if coming.done():
            close_all(answered.descriptors)
        else:
            coming.set_result(answered)
    elif not coming.done():
        coming.set_exception(answered)
