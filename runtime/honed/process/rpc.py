"""Typed calls to child processes that live: MessagePack-RPC on a socket pair, both ends.

A call is a dataclass, and its type argument is that of the answer. The child gets the number of its socket as
its last argument, and answers calls one after the other. `aio` has the parent's end in an event loop.
"""

from __future__ import annotations

import functools
import os
import select
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
from honed.protocol import streams, strict
from honed.protocol.errors import HonedError
from honed.protocol.peer import NotificationReceived, Peer, RequestReceived, ResponseReceived
from honed.protocol.wire import FrameLimits, ProtocolError, close_all

R = TypeVar("R")
FRAMES = FrameLimits(max_values=1 << 20)
_END_SECONDS = 5.0  # A process that hangs in a driver may not go; it is left behind then


class Call(Generic[R]):
    """Something to ask of a child, which answers with an R or an error; `method` is what it is called."""

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


# ---- The parent's end ----


class ChildCrashed(Exception):
    """The child died, or was killed because it missed a deadline; the text is a clause about that."""

    def __init__(self, death: ExitInfo, phase: str) -> None:
        super().__init__(str(death))
        self.death = death
        self.phase = phase  # What it had announced last


class RpcChild:
    """One child process in a process group of its own, which it shares with what its driver starts.

    It dies with the thread that made this object (PR_SET_PDEATHSIG), so let that be one that lasts. Not for
    several threads at once.
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

        `log` takes what the child and its driver print, in place of what this process prints to.
        `environment` is set beside that of this process.
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
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor of the child's socket, for `select`."""
        return self._socket.fileno()

    @property
    def holds_more(self) -> bool:
        """Whether something was read that is no part of an answer yet, which `select` does not see."""
        return self._peer.buffered > 0

    def tell(self, call: Call[Any]) -> None:
        """Send what has no answer."""
        self._peer.notify(call.method, strict.to_plain(call))
        self._send()

    def begin(self, call: Call[Any], descriptors: Sequence[int] = ()) -> None:
        """Send a call, for whose answer `answer` waits; the caller keeps the descriptors open till then."""
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
        phase. Raises the error that the child answers, and Ended, after which the child is gone.
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
        """End it and what it started, without a word to its driver."""
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
            if not streams.receive(self._socket, self._peer):
                raise ConnectionResetError
        if isinstance(event, NotificationReceived):
            return strict.from_plain(_Phase, event.params, where="a phase")
        close_all(event.descriptors)
        assert isinstance(event, ResponseReceived)
        return event.error or strict.from_plain(kind.answer(), event.result, where=kind.method)

    def _send(self) -> None:
        """Send what there is; that this fails shows in `answer`, as nothing more comes, or not in time."""
        try:
            streams.send(self._socket, self._peer)
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
    """What the child does next with the call that it answers, and the seconds that this may take."""

    phase: str
    seconds: float


def ready(children: Sequence[RpcChild], seconds: float) -> list[RpcChild]:
    """Return the children from which something has arrived, after waiting for no longer than `seconds`."""
    held = [child for child in children if child.holds_more]
    return held or select.select(children, [], [], seconds)[0]


# ---- The child's end ----

Method = tuple[type[Call[Any]], Callable[..., object]]  # A call, and what answers it of a `RpcServer`


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


class _Request(threading.local):
    descriptors: list[int]


class RpcServer:
    """Answers the calls in `METHODS`, one after the other. `answer` and `progress` are for any thread."""

    METHODS: ClassVar[dict[str, Method]]

    def __init__(self, connected: socket.socket, frames: FrameLimits = FRAMES) -> None:
        self._socket = connected
        self._peer = Peer(serves=True, receiving=frames, sending=frames)
        self._sending = threading.Lock()
        self._request = _Request()

    @property
    def descriptors(self) -> list[int]:
        """Those of the request that this thread answers, closed after that."""
        return self._request.descriptors

    def serve(self) -> None:
        """Answer until the parent hangs up."""
        while (event := self.received()) is not None:
            if isinstance(event, RequestReceived):
                self.asked(event)
            else:
                kind, handler = self.METHODS[event.method]
                handler(self, strict.from_plain(kind, event.params, where=event.method))

    def received(self) -> RequestReceived | NotificationReceived | None:
        """Wait for the next request or notification; return None when the parent has hung up."""
        with suppress(ConnectionError):
            while True:
                if isinstance(event := self._peer.next_event(), RequestReceived | NotificationReceived):
                    return event
                if event is None and not streams.receive(self._socket, self._peer):
                    return None
        return None

    def asked(self, request: RequestReceived) -> None:
        """Answer a request in its turn."""
        self._request.descriptors = request.descriptors
        self.answer(request, self.METHODS[request.method])
        close_all(request.descriptors)

    def answer(self, request: RequestReceived, method: Method) -> None:
        """Send what a method returns or raises."""
        kind, handler = method
        try:
            call = strict.from_plain(kind, request.params, where=request.method)
            result = strict.to_plain(handler(self, call))
        except Exception as raised:  # noqa: BLE001 - `error_of` raises those again that end this process
            self.refuse(request, self.error_of(raised, request.method))
            return
        with self._sending:
            self._peer.answer(request.msgid, result)
            streams.send(self._socket, self._peer)

    def refuse(self, request: RequestReceived, error: HonedError) -> None:
        """Answer a request with an error."""
        with self._sending:
            self._peer.refuse(request.msgid, error)
            streams.send(self._socket, self._peer)

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Return what is answered where a method raised; raise what is to end this process."""
        if isinstance(raised, HonedError):
            return raised
        raise raised

    def progress(self, **news: Any) -> None:
        """Report the progress of a request: `phase` and `seconds` to `RpcChild`, its `msgid` to a link."""
        with self._sending:
            self._peer.notify("Progress", news)
            streams.send(self._socket, self._peer)
