"""One connection to a MessagePack-RPC peer in an asyncio loop; the service talks to its worker so too."""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from . import endpoint, wire
from .arrivals import Arrivals, close_all
from .endpoint import Progress
from .errors import HonedError
from .protocol import error_from_map

_CHUNK = 128 << 10  # bytes read at once
_MAX_DESCRIPTORS = 64  # of one answer


class AsyncLink:
    """One connection within one event loop: any number of calls under way, answers in any order."""

    def __init__(
        self,
        connected: sockets.socket,
        *,
        limits: wire.FrameLimits | None = None,
        large: int | None = None,
        lost: Callable[[], HonedError] = endpoint.connection_lost,
    ) -> None:
        """Takes over a connected socket, in a running loop.

        `large` is that of `wire.Decoder`; `lost` makes the error for calls cut short.
        """
        connected.setblocking(False)
        self._socket = connected
        self._limits = limits or wire.FrameLimits(max_bytes=1 << 30)
        self._lost = lost
        self._decoder = wire.Decoder(self._limits, large=large)
        self._arrivals = Arrivals()
        self._sending = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[tuple[Any, list[int]]]] = {}
        self._progress: dict[int, Progress] = {}
        self._room: asyncio.Future[None] | None = None  # of who waits to send more
        self._next_msgid = 0
        self.broken: HonedError | None = None
        asyncio.get_running_loop().add_reader(connected, self._readable)

    @classmethod
    async def open(cls, path: str) -> AsyncLink:
        """Connect; raises Unavailable where no service answers."""
        connecting = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC)
        connecting.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connecting, path)
        except OSError as error:
            connecting.close()
            raise endpoint.cannot_connect(path, error) from error
        except BaseException:
            connecting.close()
            raise
        return cls(connecting)

    async def call(
        self,
        method: str,
        params: dict[str, Any],
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> Any:
        """The result of a call; raises its error. Cancelling the awaiting task cancels the request."""
        result, unwanted = await self.exchange(method, params, descriptors, progress)
        close_all(unwanted)
        return result

    async def exchange(
        self,
        method: str,
        params: dict[str, Any],
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> tuple[Any, list[int]]:
        """As `call`, with the descriptors that came along, which are the caller's."""
        self._next_msgid = msgid = (self._next_msgid + 1) & wire.MAX_MSGID
        parts = wire.encode_parts(wire.Request(msgid=msgid, method=method, params=params), self._limits)
        answer: asyncio.Future[tuple[Any, list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting[msgid] = answer
        if progress is not None:
            self._progress[msgid] = progress
        try:
            await self._send(parts, descriptors)
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                close_all(answer.result()[1])  # it came just before
            self._cancel(msgid)
            raise
        finally:
            self._waiting.pop(msgid, None)
            self._progress.pop(msgid, None)

    def usable(self) -> bool:
        """Whether the connection is up; looks for an end that the loop has not seen yet."""
        if self.broken is None:
            try:
                if not self._socket.recv(1, sockets.MSG_PEEK | sockets.MSG_DONTWAIT):
                    self.fail(self._lost())
            except BlockingIOError:
                pass  # nothing to read: up
            except OSError:
                self.fail(self._lost())
        return self.broken is None

    def fail(self, error: HonedError) -> None:
        """End the connection; everyone waiting gets `error`."""
        if self.broken is not None:
            return
        self.broken = error
        asyncio.get_running_loop().remove_reader(self._socket)
        asyncio.get_running_loop().remove_writer(self._socket)
        self._socket.close()
        self._arrivals.close()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    async def _send(self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int]) -> None:
        begun = False
        async with self._sending:
            try:
                for part in parts:
                    left = memoryview(part)
                    while left:
                        if self.broken is not None:
                            raise self.broken
                        sent = await self._send_some(left, descriptors)
                        descriptors, begun = (descriptors, begun) if sent == 0 else ((), True)
                        left = left[sent:]
            except OSError as error:
                self.fail(self._lost())
                raise self._lost() from error
            except asyncio.CancelledError:
                if begun:
                    self.fail(self._lost())  # part of the frame is out: nothing can follow it
                raise

    async def _send_some(self, data: memoryview, descriptors: Sequence[int]) -> int:
        """Send what fits now; 0 after waiting for room."""
        try:
            if descriptors:
                return sockets.send_fds(self._socket, [data], descriptors)
            return self._socket.send(data)
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            self._room = loop.create_future()
            loop.add_writer(self._socket, self._writable)
            await self._room
            return 0

    def _writable(self) -> None:
        asyncio.get_running_loop().remove_writer(self._socket)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _cancel(self, msgid: int) -> None:
        if self.broken is None:
            frame = wire.encode(wire.Notification(method="Cancel", params={"msgid": msgid}))
            # A full socket: the service then learns it from nobody, and the late answer is dropped.
            with suppress(OSError):
                if self._socket.send(frame) != len(frame):
                    self.fail(self._lost())

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = sockets.recv_fds(
                self._socket, _CHUNK, _MAX_DESCRIPTORS, sockets.MSG_CMSG_CLOEXEC
            )
            self._arrivals.note(len(data), descriptors)
            if not data:
                raise ConnectionResetError
            self._decoder.feed(data)
            while self.broken is None and (message := self._decoder.next_message()) is not None:
                self._deliver(message, self._arrivals.take(self._decoder.buffered))
        except BlockingIOError:
            return
        except OSError:
            self.fail(self._lost())
        except wire.PeerFault as fault:
            self.fail(fault.error)

    def _deliver(self, message: wire.Message, descriptors: list[int]) -> None:
        match message:
            case wire.Response(msgid=msgid, error=error, result=result):
                answer = self._waiting.get(msgid)
                if answer is None or answer.done():
                    pass  # it was cancelled meanwhile
                elif error is None:
                    answer.set_result((result, descriptors))
                    descriptors = []
                else:
                    answer.set_exception(error_from_map(error))
            case wire.Notification(method="Progress", params=params):
                self._show_progress(params)
            case wire.Notification(method="Error", params=params):
                self.fail(error_from_map(params))
        close_all(descriptors)

    def _show_progress(self, params: dict[str, Any]) -> None:
        msgid = params.get("msgid", -1)
        progress, answer = self._progress.get(msgid), self._waiting.get(msgid)
        if progress is None or answer is None or answer.done():
            return
        try:
            progress(params)
        except Exception as error:  # noqa: BLE001 - it is the caller's own, and raised from its call
            self._cancel(msgid)
            answer.set_exception(error)
