"""The store as the service changes it: one change at a time."""

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

_RETRY_SECONDS = 30.0  # After which what could not be stored is stored again
_log = logging.getLogger(__name__)


class StoreWriter:
    """Stores what `models` are. A caller that changes the store holds `turn` until the models follow."""

    def __init__(self, store: Store, models: Registry) -> None:
        self._store = store
        self._models = models
        self.turn = asyncio.Lock()

    async def commit(self, manifest: Manifest, staged: Sequence[tuple[StoredFile, Path]] = ()) -> None:
        """Store a manifest and its new files; an error leaves none of it. The caller has the turn."""
        try:
            await in_thread(self._store.commit, manifest, staged)
        except HonedError:
            await self.sweep()
            raise

    async def sweep(self) -> None:
        """Delete the files that no model needs any more."""
        await in_thread(self._store.sweep, self._models.manifests())

    async def rewrite(self, model: ServedModel) -> None:
        """Store the present manifest of a model, if that is served."""
        async with self.turn:
            if self._models.keeps(model):
                await self.commit(model.manifest)
                await self.sweep()

    async def persist(self, model: ServedModel) -> None:
        """Store the manifest of a model, trying again until it is done.

        So no start of the service brings a quarantined version back.
        """
        while self._models.keeps(model):
            try:
                await self.rewrite(model)
            except HonedError as error:
                _log.error("model %s: its versions are not stored yet: %s", model.name, error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return
