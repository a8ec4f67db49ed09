"""Schedules calls in a process that runs models: in order, but others may run beside a long one.

One thread reads calls and runs them itself, without a switch between threads. When a call takes long, another
thread takes over reading: it receives requests to end that call, and runs further calls if these may run
beside those in progress. Otherwise they wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from honed.protocol.peer import RequestReceived

_LONG_SECONDS = 0.1  # Time of a call after which another thread reads; up to twice that
_STACK = 2 << 20  # Bytes of a reading thread's stack, which count in full against the memory limit
_log = logging.getLogger(__name__)


class CallUnderWay:
    """A running call; `ended` once its client gave up."""

    __slots__ = ("_how", "ended", "request")

    def __init__(self, request: RequestReceived) -> None:
        self.request = request
        self.ended = False
        self._how: Callable[[], object] | None = None

    def ends_by(self, how: Callable[[], object]) -> None:
        """Register `how` to be called, in another thread, when the call is to end."""
        self._how = how
        if self.ended:
            how()

    def end(self) -> None:
        """Request the call to end soon, if it can."""
        self.ended = True
        if self._how is not None:
            self._how()


class _Present(threading.local):
    call: CallUnderWay | None = None


class Turns:
    """A scheduler of a process's calls; `end` is for the reading thread, `present` for any."""

    def __init__(
        self,
        read: Callable[[], RequestReceived | None],
        answer: Callable[[CallUnderWay], None],
        refuse: Callable[[RequestReceived], None],
        beside: Callable[[RequestReceived, RequestReceived], bool],
    ) -> None:
        """Initialise; `read` waits for the next call, and returns None at the end.

        `refuse` answers a call whose client gave up before it began. `beside` returns whether its first call
        may begin while its second runs.
        """
        self._next = read
        self._answer = answer
        self._refuse = refuse
        self._beside = beside
        self._lock = threading.Lock()
        self._under_way: dict[int, CallUnderWay] = {}
        self._waiting: deque[RequestReceived] = deque()
        self._reader = 0  # The id of the reading thread
        self._own: CallUnderWay | None = None  # The call that the reading thread runs
        self._begun = 0  # Number of calls begun so far
        self._watched = False  # A thread watches how long that call takes
        self._watch = threading.Semaphore(0)
        self._over = threading.Event()
        self._present = _Present()

    @property
    def present(self) -> CallUnderWay | None:
        """The call that the current thread runs; None if it runs none, or loads a model."""
        return self._present.call

    def serve(self) -> None:
        """Run calls until `read` returns None."""
        self._reader = threading.get_ident()
        self._start_relief()
        self._read()
        self._over.wait()
        if self._under_way:
            os._exit(0)  # A normal exit would unload libraries that running calls use

    def end(self, number: object) -> None:
        """End a running or waiting call whose client gave up."""
        with self._lock:
            call = self._under_way.get(number) if isinstance(number, int) else None
            waits = next((each for each in self._waiting if each.msgid == number), None)
            if waits is not None:
                self._waiting.remove(waits)
        if call is not None:
            call.end()
        elif waits is not None:
            self._refuse(waits)

    def _read(self) -> None:
        try:
            while (request := self._next()) is not None:
                if not self._take(request):
                    return  # Another thread reads
        except Exception:  # noqa: BLE001 - without a reading thread the service would wait in vain
            try:
                _log.exception("the worker cannot read")
            finally:
                os._exit(1)  # The service starts another
        self._over.set()

    def _take(self, request: RequestReceived) -> bool:
        """Run a call and those that wait for it, or let it wait; return whether this thread still reads."""
        with self._lock:
            if self._waiting or not self._may_begin(request):
                self._waiting.append(request)
                return True
            call = self._own = self._begin(request)
            if not self._watched:
                self._watched = True
                self._watch.release()
        while True:
            self._present.call = call
            self._answer(call)
            self._present.call = None
            with self._lock:
                del self._under_way[call.request.msgid]
                reads = self._reader == threading.get_ident()
                more = bool(self._waiting) and self._may_begin(self._waiting[0])
                if more:
                    call = self._begin(self._waiting.popleft())
                if reads:
                    self._own = call if more else None
                if not more:
                    return reads

    def _may_begin(self, request: RequestReceived) -> bool:
        return all(self._beside(request, other.request) for other in self._under_way.values())

    def _begin(self, request: RequestReceived) -> CallUnderWay:
        self._begun += 1
        call = self._under_way[request.msgid] = CallUnderWay(request)
        return call

    def _start_relief(self) -> None:
        before = threading.stack_size(_STACK)
        try:
            threading.Thread(target=self._relieve, name="relief", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _relieve(self) -> None:
        """Take over reading from a thread whose call takes long."""
        while True:
            self._watch.acquire()
            if self._take_over():
                self._read()
                return

    def _take_over(self) -> bool:
        """Watch the reading thread; return True if this thread must read now.

        Returns False if there was no call for a while, when there is nothing to watch.
        """
        before, begun = None, -1
        while True:
            time.sleep(_LONG_SECONDS)
            with self._lock:
                own = self._own
                if own is not None and own is before:
                    try:
                        self._start_relief()
                    except RuntimeError:  # Without memory for a thread, wait for the call
                        continue
                    self._reader, self._own, self._watched = threading.get_ident(), None, False
                    return True
                if own is None and self._begun == begun:
                    self._watched = False
                    return False
                before, begun = own, self._begun
