"""A call later in an event loop, that can be taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """One call at a time, always after the same `seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]) -> None:
        self._loop = loop
        self.seconds = seconds
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Call back after the seconds, unless it is running already."""
        if self._handle is None:
            self._handle = self._loop.call_later(self.seconds, self._fire)

    def stop(self) -> None:
        """Do not call back."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
