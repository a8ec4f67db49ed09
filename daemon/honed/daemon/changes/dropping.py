"""Models and variants leave the store and the service."""

from __future__ import annotations

from collections.abc import Sequence

from honed.daemon.blocking import in_thread, to_its_end
from honed.daemon.core.messages import Removed
from honed.daemon.core.state import Registry
from honed.daemon.observe.latencies import Latencies
from honed.daemon.serving.commits import Commits
from honed.daemon.serving.pool import Pool
from honed.daemon.store.store import Store


class Dropping:
    """Removes from the store first: where that fails a model is served as before."""

    def __init__(
        self, store: Store, registry: Registry, pool: Pool, commits: Commits, latencies: Latencies
    ) -> None:
        self._store = store
        self._registry = registry
        self._pool = pool
        self._commits = commits
        self._latencies = latencies

    async def remove(self, name: str) -> None:
        """Remove a model with its variants; raises NotFound."""
        async with self._commits.turn:
            self._registry.get(name)
            await self.drop([*(each.name for each in self._registry.variants(name)), name])

    async def variants(self, names: Sequence[str]) -> None:
        """Delete variants, of those that there are."""
        await to_its_end(self._variants_in_turn(names))

    async def _variants_in_turn(self, names: Sequence[str]) -> None:
        async with self._commits.turn:
            await self.drop([name for name in names if self._registry.variant(name) is not None])

    async def drop(self, names: Sequence[str]) -> None:
        """Delete what is there; the caller has the turn to commit."""
        for name in names:
            remaining = [manifest for manifest in self._registry.manifests() if manifest.name != name]
            await in_thread(self._store.remove, name, remaining)
            self._pool.handle(Removed(name))
            self._latencies.forget(name)
