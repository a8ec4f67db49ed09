"""Serialises the service's changes of the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.store.files import StoredFile
from honed.daemon.store.store import Manifest, Store
from honed.protocol.errors import HonedError

_RETRY_SECONDS = 30.0  # Pause before a failed write is retried
_log = logging.getLogger(__name__)


class StoreWriter:
    """A writer of manifests; callers hold `turn` from a change of the store until `models` agrees."""

    def __init__(self, store: Store, models: Registry) -> None:
        self._store = store
        self._models = models
        self.turn = asyncio.Lock()

    async def commit(self, manifest: Manifest, staged: Sequence[tuple[StoredFile, Path]] = ()) -> None:
        """Store a manifest and its new files, or neither if that raises. The caller holds `turn`."""
        try:
            await in_thread(self._store.commit, manifest, staged)
        except HonedError:
            await self.sweep()
            raise

    async def sweep(self) -> None:
        """Delete the files that no model needs."""
        await in_thread(self._store.sweep, self._models.manifests())

    async def rewrite(self, model: ServedModel) -> None:
        """Store the present manifest of a model, if that is served or suspended."""
        async with self.turn:
            if self._models.keeps(model):
                await self.commit(model.manifest)
                await self.sweep()

    async def persist(self, model: ServedModel) -> None:
        """Store the manifest of a model, and retry until that succeeds.

        Otherwise a restart of the service could serve a quarantined version again.
        """
        while self._models.keeps(model):
            try:
                await self.rewrite(model)
            except HonedError as error:
                _log.error("model %s: its versions are not stored yet: %s", model.name, error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return
