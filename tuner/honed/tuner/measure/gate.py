"""Gates at which a session waits for its turn: one that is always open, and one that holds the idle lease.

Between two candidates the lease is given up at once when it is revoked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from honed.protocol.errors import HonedError
from honed.runtime.calling.leaseclient import LeaseHolder

_LOOK_SECONDS = 0.05  # Seconds between two looks at the lease while the device is not used
_SLICE_SECONDS = 0.2  # Seconds of one wait for the lease


class Gate:
    """A gate that is always open."""

    def enter(self) -> bool:
        """Wait until the device may be used; return False to stop.

        Call this before each candidate and each other step.
        """
        return True

    def leave(self) -> None:
        """Stop using the device until `enter` is called again."""


class LeaseGate(Gate):
    """Opens while the lease is held, for `seconds` of it in all.

    A context manager. While the session searches and compiles, a thread watches the lease and releases it
    when it is revoked: the service need not wait for the end of a step that leaves the device alone.
    """

    def __init__(
        self,
        lease: LeaseHolder,
        *,
        seconds: float,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up; `patience`: seconds to wait for the lease at a time, before the session ends without it."""
        self.held = 0.0  # Seconds that the lease was held between the first `enter` and the last
        self._lease = lease
        self._seconds = seconds
        self._patience = patience
        self._clock = clock
        self._lock = threading.Lock()  # Guards all below, and the lease
        self._using = False
        self._stopped = (
            False  # The session must end; no lock, because a handler must take none that it interrupted
        )
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="lease", daemon=True)
        self._last: float | None = None
        self._error: HonedError | None = None

    def __enter__(self) -> LeaseGate:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._watcher.join()

    def enter(self) -> bool:
        """Wait for the lease. False when the time is used up, patience ends or `close` was called.

        Raises the service's error in the watching thread, where it refuses this tuner.
        """
        begun = self._clock()
        while not self._stopped:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if self._lease.wait_until_granted(_SLICE_SECONDS):
                    self._using = True
                    self._count()
                    return self.held < self._seconds
                self._last = None
            if self._clock() - begun > self._patience:
                return False
        return False

    def leave(self) -> None:
        """Stop using the device until the next `enter`."""
        with self._lock:
            self._count()
            self._using = False

    def close(self) -> None:
        """Make `enter` return False from now on; may be called from a signal handler."""
        self._stopped = True

    def _count(self) -> None:
        now = self._clock()
        if self._last is not None:
            self.held += now - self._last
        self._last = now

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with self._lock:
                if self._using or self._lease.may_run():
                    continue
                self._last = None
                try:
                    self._lease.wait_until_granted(0.0)  # Releases a revoked lease, and requests another
                except HonedError as error:
                    self._error = error
                    return
