"""Stores values of the service in JSON files over restarts: usage, latency curves, quotas of apps."""

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

SAVE_SECONDS = 60.0  # Interval of writes: a crash loses no more than this
_MAX_BYTES = 64 << 20
_log = logging.getLogger(__name__)
T = TypeVar("T")


class StateFile(Generic[T]):
    """The file of a value, a dataclass of `kind`; it is replaced atomically.

    `what` names the value in the log. `none_omitted` as in `strict.from_plain`.
    """

    def __init__(self, path: Path, kind: type[T], what: str, *, none_omitted: bool = False) -> None:
        self._path = path
        self._kind = kind
        self._what = what
        self._none_omitted = none_omitted
        self._saved = b""  # Contents of the file
        self._unsaved = b""  # Contents that could not be written

    def read(self, check: Callable[[T], None] = lambda value: None) -> T | None:
        """Return the value in the file, or None if there is no file, or it is unreadable.

        An unreadable file is set aside and logged. `check` raises ValueError for impossible values.
        """
        try:
            data = read_regular(self._path, _MAX_BYTES)
            value = strict.from_plain(
                self._kind, json.loads(data), where=self._path.name, none_omitted=self._none_omitted
            )
            check(value)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # Unreadable, or another format
            _log.error("%s is lost (%s); %s", self._what, error, put_aside(self._path))
            return None
        self._saved = data
        return value

    async def save(self, value: T | None) -> None:
        """Write the value if it changed; with None, retry a failed write."""
        data = json.dumps(strict.to_plain(value), indent=1).encode() if value is not None else self._unsaved
        if data == self._saved:
            self._unsaved = b""
        elif data:
            await in_thread(self._write, data)

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
