"""Compares engines again in idle time if other programs were busy during the last comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from honed.daemon.background import Pauses
from honed.daemon.changes.change import Changes
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.feature import BackgroundTask, Feature
from honed.daemon.idle.leasing import Leasing


@dataclass(slots=True, kw_only=True, eq=False)
class EngineReselection(Feature):
    """A feature that chooses again between the engines of models whose times are provisional."""

    changes: Changes
    registry: Registry
    leasing: Leasing
    _pauses: Pauses = field(init=False, default_factory=Pauses)

    def forget(self, model: str) -> None:
        """Drop the pause of a removed model."""
        self._pauses.forget(model)

    def background(self, *, idle: bool) -> BackgroundTask | None:
        """Return the comparison for the next model that is due, if any."""
        for entry in (*self.registry.models(), *self.registry.variants()) if idle else ():
            times = entry.manifest.decision.times
            provisional = times is not None and times.others_percent is not None
            if provisional and self.changes.pool.comparable(entry) and self._pauses.over(entry.name):
                return BackgroundTask(f"comparing the engines of {entry.name}", partial(self._compare, entry))
        return None

    async def _compare(self, entry: ServedModel) -> None:
        """Compare the engines of a model, with longer pauses while other programs stay busy."""
        self._pauses.begin(entry.name)
        with self.leasing.adding(0, "the engines of a model are being compared"):
            async with self.changes.begin(entry.name):
                self.changes.pool.handle(await self.changes.pool.compare_engines(entry))
