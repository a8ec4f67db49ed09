"""Removes a model, with everything that is remembered of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.changes.add import ModelInstaller
from honed.daemon.core.state import Registry
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.settings.places import users_cache


@dataclass(slots=True, kw_only=True)
class ModelRemover:
    """Removes models from a service. Each of `forget` is called with the name of what was removed."""

    registry: Registry
    jobs: ModelInstaller
    ledger: UsageLog
    leasing: Leasing
    cache_dir: Path
    forget: Sequence[Callable[[str], None]] = ()

    async def remove(self, name: str) -> None:
        """Stop serving a model and delete its files; raises NotFound.

        What is remembered of a user goes with the last of the user's own models.
        """
        owner = self.registry.model(name).manifest.owner
        variants = [each.name for each in self.registry.variants(name)]
        await self.jobs.remove(name)
        for each in (*variants, name):
            self.ledger.forget(each)
            self.leasing.forget(each)
            for forget in self.forget:
                forget(each)
        if owner is not None and not any(e.manifest.owner == owner for e in self.registry.models()):
            await in_thread(shutil.rmtree, users_cache(self.cache_dir, owner), ignore_errors=True)
