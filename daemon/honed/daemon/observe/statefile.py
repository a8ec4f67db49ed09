"""A value that the service keeps in a JSON file over restarts: usage, latency curves, shares of apps."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

from honed.daemon.aio import in_thread
from honed.machine.files import put_aside, read_regular, replacing
from honed.protocol import strict
from honed.protocol.errors import HonedError

SAVE_SECONDS = 60.0  # Between two writes: a crash loses no more than this
_MAX_BYTES = 64 << 20
_log = logging.getLogger(__name__)
T = TypeVar("T")


class StateFile(Generic[T]):
    """The file of one value, a dataclass of `kind`; it is written whole or not at all.

    `what` names the value in the log. `none_omitted` as in `strict.from_plain`.
    """

    def __init__(self, path: Path, kind: type[T], what: str, *, none_omitted: bool = False) -> None:
        self._path = path
        self._kind = kind
        self._what = what
        self._none_omitted = none_omitted
        self._saved = b""  # What the file holds
        self._unsaved = b""  # What could not be written

    def read(self, check: Callable[[T], None] = lambda value: None) -> T | None:
        """Return what the file holds, or None where there is no file, or none that can be read.

        That one is set aside and reported in the log. `check` raises ValueError for values that cannot be.
        """
        try:
            data = read_regular(self._path, _MAX_BYTES)
            value = strict.from_plain(
                self._kind, json.loads(data), where=self._path.name, none_omitted=self._none_omitted
            )
            check(value)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # No file, not JSON, not UTF-8, or not ours
            _log.error("%s is lost (%s); %s", self._what, error, put_aside(self._path))
            return None
        self._saved = data
        return value

    async def save(self, value: T | None) -> None:
        """Write the value if it changed; with None, write what could not be written before."""
        data = self._encoded(value)
        if data is not None:
            await in_thread(self._write, data)

    def write(self, value: T | None) -> None:
        """Do what `save` does, in this thread."""
        data = self._encoded(value)
        if data is not None:
            self._write(data)

    def _encoded(self, value: T | None) -> bytes | None:
        data = json.dumps(strict.to_plain(value), indent=1).encode() if value is not None else self._unsaved
        if data == self._saved:
            self._unsaved = b""
            return None
        return data or None

    def _write(self, data: bytes) -> None:
        try:
            with replacing(self._path) as file:
                file.write(data)
        except HonedError as error:
            if not self._unsaved:
                _log.error("%s cannot be saved: %s", self._what, error)
            self._unsaved = data
        else:
            self._saved, self._unsaved = data, b""


async def save_at_intervals(
    save: Callable[[], Awaitable[None]], seconds: Callable[[], float] = lambda: SAVE_SECONDS
) -> None:
    """Save until cancelled, and then once more."""
    try:
        while True:
            await asyncio.sleep(seconds())
            await save()
    finally:
        await save()
