"""Typed calls to child processes that keep running: MessagePack-RPC on a socket pair, both ends.

A call is a dataclass, and its type argument is that of the answer. The child gets the number of its socket as
its last argument, and answers calls in order. `aio` has the parent's end for an event loop.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from honed.process.children import FREE, ExitInfo, ResourceLimits, kill_group, last_line, start
from honed.protocol import strict
from honed.protocol.errors import HonedError
from honed.protocol.peer import (
    NotificationReceived,
    Peer,
    RequestReceived,
    ResponseReceived,
    read_socket,
    write_socket,
)
from honed.protocol.wire import FrameLimits, ProtocolError, close_all

R = TypeVar("R")
FRAMES = FrameLimits(max_values=1 << 20)
_END_SECONDS = 5.0  # Seconds; a process that hangs in a driver may not end, and is abandoned


class Call(Generic[R]):
    """A call to a child, which answers with an R or an error; `method` is its name in messages."""

    __slots__ = ()
    method: ClassVar[str]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.method = cls.__dict__.get("method", cls.__name__)

    @classmethod
    @functools.cache
    def answer(cls) -> type[R]:
        """Return R, the class of the call's answer."""
        found: type[R] = typing.get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        return found

    @classmethod
    def decode(cls, answered: ResponseReceived) -> R:
        """Return the child's answer; close descriptors received with it."""
        close_all(answered.descriptors)
        return strict.from_plain(cls.answer(), answered.result, where=cls.method)


# ---- The parent's end ----


class ChildCrashed(Exception):
    """Raised when the child exits or is killed at a deadline; the message says which."""

    def __init__(self, death: ExitInfo, phase: str) -> None:
        super().__init__(str(death))
        self.death = death
        self.phase = phase  # Phase that it announced last


class RpcChild:
    """A child process in a process group of its own, which it shares with processes that its driver starts.

    It dies with the thread that created this object (PR_SET_PDEATHSIG), so that must be a lasting one. Not
    thread-safe.
    """

    def __init__(
        self,
        program: Sequence[str],
        bounds: ResourceLimits = FREE,
        *,
        frames: FrameLimits = FRAMES,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the child process; raise OSError.

        What the child and its driver print goes to `log`, or where this process prints to. `environment` adds
        to that of this process.
        """
        self._log = log
        self._peer = Peer(serves=False, receiving=frames, sending=frames)
        self._socket, theirs = socket.socketpair()
        with theirs, log.open("wb") if log is not None else nullcontext(None) as output:
            try:
                self._process = start(
                    [*program, str(theirs.fileno())],
                    bounds,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    environment=None if environment is None else os.environ | dict(environment),
                )
            except BaseException:
                self._socket.close()
                raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def tell(self, call: Call[Any]) -> None:
        """Send a call that has no answer."""
        self._peer.notify(call.method, strict.to_plain(call))
        self._send()

    def begin(self, call: Call[Any], descriptors: Sequence[int] = ()) -> None:
        """Send a call, for `answer` to wait for; the caller keeps the descriptors open until then."""
        self._peer.call(call.method, strict.to_plain(call), descriptors)
        self._send()

    def call(
        self,
        call: Call[R],
        descriptors: Sequence[int] = (),
        *,
        seconds: float | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> R:
        """Send a call, and wait for its answer as `answer` does."""
        self.begin(call, descriptors)
        return self.answer(type(call), seconds, on_phase)

    def answer(
        self,
        kind: type[Call[R]],
        seconds: float | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> R:
        """Return the child's answer to the oldest unanswered call, which must be of class `kind`.

        The answer may take `seconds`, and after each phase that the child announces the seconds of that
        phase. Raises the error that the child answers, and ChildCrashed, after which the child is gone.
        """
        phase = "start"
        while True:
            try:
                heard = self._next(kind, seconds)
            except TimeoutError:
                self.kill()
                raise ChildCrashed(self._death(seconds), phase) from None
            except (OSError, ProtocolError, strict.SchemaError):
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_SECONDS)
                death = self._death()
                self.kill()
                raise ChildCrashed(death, phase) from None
            if isinstance(heard, HonedError):
                raise heard
            if not isinstance(heard, _Phase):
                return heard
            phase, seconds = heard.phase, heard.seconds
            if on_phase is not None:
                on_phase(phase)

    def kill(self) -> None:
        """Kill the child and what it started, without notice to its driver."""
        kill_group(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._socket.close()
        self._peer.close()

    def _next(self, kind: type[Call[R]], seconds: float | None) -> R | HonedError | _Phase:
        """Return the child's next answer, error or phase; raise TimeoutError after `seconds` without one."""
        until = None if seconds is None else time.monotonic() + seconds
        while (event := self._peer.next_event()) is None:
            timeout = None if until is None else max(until - time.monotonic(), 1e-3)
            if timeout != self._socket.gettimeout():
                self._socket.settimeout(timeout)
            if not read_socket(self._socket, self._peer):
                raise ConnectionResetError
        if isinstance(event, NotificationReceived):
            return strict.from_plain(_Phase, event.params, where="a phase")
        assert isinstance(event, ResponseReceived)
        if event.error is None:
            return kind.decode(event)
        close_all(event.descriptors)
        return event.error

    def _send(self) -> None:
        """Send pending data; if that fails, `answer` notices, as no answer arrives or not in time."""
        try:
            write_socket(self._socket, self._peer)
        except TimeoutError:
            pass
        except OSError:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _death(self, deadline: float | None = None) -> ExitInfo:
        said = ""
        if self._log is not None:
            with self._log.open("rb") as log:
                said = last_line(log)
        return ExitInfo(status=self._process.returncode, deadline=deadline, said=said)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """An announcement of the child's next step in a call, and the seconds that it may take."""

    phase: str
    seconds: float


# ---- The child's end ----

Method = tuple[type[Call[Any]], Callable[..., object]]  # A call and its handler in a `RpcServer`


def by_name(handlers: Mapping[type[Call[Any]], Callable[..., object]]) -> dict[str, Method]:
    """Return each call's class and handler, by the call's method name in messages."""
    return {call.method: (call, handler) for call, handler in handlers.items()}


def connect(arguments: Sequence[str] | None = None) -> socket.socket:
    """Return the socket whose number is the last of a child's arguments.

    Processes that the child starts do not inherit it. Redirects what drivers and libraries print to standard
    error.
    """
    os.dup2(2, 1)
    connected = socket.socket(fileno=int((sys.argv if arguments is None else arguments)[-1]))
    connected.set_inheritable(False)
    return connected


class _CurrentRequest(threading.local):
    descriptors: list[int]


class RpcServer:
    """The child's server of the calls in `METHODS`, in order. `answer` and `progress` are thread-safe."""

    METHODS: ClassVar[dict[str, Method]]

    def __init__(self, connected: socket.socket, frames: FrameLimits = FRAMES) -> None:
        self._socket = connected
        self._peer = Peer(serves=True, receiving=frames, sending=frames)
        self._sending = threading.Lock()
        self._request = _CurrentRequest()

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of the request that this thread answers, closed after that."""
        return self._request.descriptors

    def serve(self) -> None:
        """Answer calls until the parent closes the connection."""
        while (event := self.next_message()) is not None:
            if isinstance(event, RequestReceived):
                self.handle(event)
            else:
                kind, handler = self.METHODS[event.method]
                handler(self, strict.from_plain(kind, event.params, where=event.method))

    def next_message(self) -> RequestReceived | NotificationReceived | None:
        """Wait for the next request or notification; return None when the parent has hung up."""
        try:
            while True:
                event = self._peer.next_event()
                if event is None and not read_socket(self._socket, self._peer):
                    return None
                if event is not None and not isinstance(event, ResponseReceived):
                    return event
        except ConnectionError:
            return None

    def handle(self, request: RequestReceived) -> None:
        """Answer a request in its turn, and close its descriptors."""
        self._request.descriptors = request.descriptors
        self.answer(request, self.METHODS[request.method])
        close_all(request.descriptors)

    def answer(self, request: RequestReceived, method: Method) -> None:
        """Send what a method returns or raises."""
        kind, handler = method
        try:
            call = strict.from_plain(kind, request.params, where=request.method)
            result = strict.to_plain(handler(self, call), omit_defaults=True)
        except Exception as raised:  # noqa: BLE001 - `error_of` raises those again that end this process
            self.refuse(request, self.error_of(raised, request.method))
            return
        with self._sending:
            self._peer.answer(request.msgid, result)
            self._send()

    def refuse(self, request: RequestReceived, error: HonedError) -> None:
        """Answer a request with an error."""
        with self._sending:
            self._peer.refuse(request.msgid, error)
            self._send()

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Return the error to answer if a method raised; raise one that must end this process."""
        if isinstance(raised, HonedError):
            return raised
        raise raised

    def progress(self, **news: Any) -> None:
        """Report the progress of a request: `phase` and `seconds` to `RpcChild`, its `msgid` to a link."""
        with self._sending:
            self._peer.notify("Progress", news)
            self._send()

    def _send(self) -> None:
        try:
            write_socket(self._socket, self._peer)
        except ConnectionError:
            return  # The parent has hung up: `next_message` returns None
