"""A device whose worker does not start any more: another serves its models until it is back.

The compiled files stay as they are: a file runs on any device within whose limits it is, and is served there
only if its probes are answered right (docs/format.md).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from honed.runtime.errors import HonedError

from .lane import Lane
from .models import Entry, Registry, State
from .store import Store
from .supervisor import WorkerLost

if TYPE_CHECKING:
    from .fleet import Fleet

CPU = "cpu"  # as a device: the first CPU there is
_log = logging.getLogger(__name__)


class Losses:
    """Moves models off devices that are lost, and back."""

    def __init__(self, registry: Registry, store: Store, fallback: str, fleet: Fleet) -> None:
        """`fallback` is the device that stands in for others; "" for none."""
        self._registry = registry
        self._store = store
        self._fallback = fallback
        self._fleet = fleet

    def lost(self, lane: Lane) -> None:
        """No worker starts on a device: have another serve its models, if there is one."""
        entries = [each for each in self._registry.of(lane.name) if each.state is not State.UNAVAILABLE]
        other = self._other(lane) if entries else None
        if other is None or other.state == "failed":
            return
        reason = lane.supervisor.reason
        for entry in entries:
            entry.lane, entry.state = other.name, State.LOADING
            entry.away = f"{other.shown} stands in for {lane.shown}, which is lost: {reason}"
            lane.dispatcher.hand_over(entry.name)
        names = ", ".join(entry.name for entry in entries)
        _log.error(
            "%s is lost (%s): %s stands in for it and serves %s", lane.shown, reason, other.shown, names
        )
        self._fleet.start(other)
        other.loader.reload()

    async def back(self, lane: Lane) -> None:
        """A device has a worker: the models that belong there go back, each once it is loaded and right."""
        for entry in self._registry.all():
            if entry.home != lane.name or entry.at_home:
                continue
            try:
                await self._bring_back(entry, lane)
            except WorkerLost:
                return  # the next worker's turn
            except HonedError as error:
                entry.away = f"{self._fleet.of(entry).shown} stands in for {lane.shown}, which fails: {error}"
                _log.error("model %s stays on %s: %s", entry.name, self._fleet.of(entry).shown, error)
        for other in self._fleet.lanes.values():
            self._fleet.dismiss(other)

    async def _bring_back(self, entry: Entry, lane: Lane) -> None:
        with lane.loader.keeping(entry.key):
            loaded = await lane.loader.load(entry.key, str(self._store.object(entry.manifest.compiled)))
            if self._registry.find(entry.name) is not entry or entry.at_home:
                return
            stand_in = self._fleet.of(entry)
            entry.lane, entry.away = lane.name, ""
            entry.state, entry.reason = State.LOADING, ""
            entry.crashes = entry.load_crashes = 0
            lane.loader.admit(entry, loaded)
        stand_in.dispatcher.hand_over(entry.name)
        stand_in.loader.unload(entry.key)
        _log.info("model %s is served by %s again", entry.name, lane.shown)

    def _other(self, lane: Lane) -> Lane | None:
        """What stands in for a device: the fallback, unless that is the device itself."""
        wanted = self._fallback.casefold()
        if not wanted or lane.name.casefold() == wanted or lane.stand_in:
            return None
        if wanted == CPU and _is_cpu(lane):
            return None
        for other in self._fleet.lanes.values():
            if other is not lane and (
                other.name.casefold() == wanted
                or (wanted == CPU and _is_cpu(other) and other.state == "ready")
            ):
                return other
        return self._fleet.add_stand_in(self._fallback)


def _is_cpu(lane: Lane) -> bool:
    profile = lane.supervisor.profile
    return profile is not None and profile.rules.family == "cpu"
