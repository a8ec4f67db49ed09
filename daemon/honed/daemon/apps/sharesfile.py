"""Keeps what users did with their shares in a file, so that it outlasts the service."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from honed.daemon.blocking import in_thread
from honed.machine.files import put_aside, read_regular, replacing
from honed.protocol import strict
from honed.protocol.errors import HonedError

from .quota import Shares

_SAVE_SECONDS = 60.0  # at most so much of it is lost
_MAX_BYTES = 16 << 20
_log = logging.getLogger(__name__)


class SharesFile:
    """The shares of one service. A file that is not readable is set aside and told in the log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.shares = self._read()
        self._saved = self._dumps()

    async def keep(self) -> None:
        """Save now and then, until cancelled."""
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Save what is new. A disk that is full is said, and tried again."""
        data = self._dumps()
        if data == self._saved:
            return
        try:
            await in_thread(self._write, data)
        except HonedError as error:
            _log.warning("what apps used is not stored: %s", error)
        else:
            self._saved = data

    def _dumps(self) -> bytes:
        return json.dumps(strict.to_plain(self.shares)).encode()

    def _write(self, data: bytes) -> None:
        with replacing(self._path) as file:
            file.write(data)

    def _read(self) -> Shares:
        try:
            data = read_regular(self._path, _MAX_BYTES)
            return strict.from_plain(Shares, json.loads(data), where=self._path.name)
        except FileNotFoundError:
            return Shares()
        except (OSError, ValueError, RecursionError) as error:
            aside = put_aside(self._path)
            _log.warning("what apps used is not known, it cannot be read (%s); %s", error, aside)
            return Shares()
