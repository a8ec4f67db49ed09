"""Keeps what users did with their shares in a file, so that it outlasts the service."""

from __future__ import annotations

from pathlib import Path

from honed.daemon.observe.statefile import SAVE_SECONDS, StateFile, save_at_intervals

from .quota import Shares


class SharesFile:
    """The shares of one service."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, Shares, "what apps used")
        self.shares = self._file.read() or Shares()

    async def keep(self) -> None:
        """Save at intervals until cancelled."""
        await save_at_intervals(self.save, lambda: SAVE_SECONDS)

    async def save(self) -> None:
        """Write what changed since it was last written, if anything did."""
        await self._file.save(self.shares)
