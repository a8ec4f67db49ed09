"""One device with what serves it: its worker, the models in that, and the requests that wait for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime import strict

from .dispatch import Dispatcher
from .latencies import Latencies
from .limits import Limits
from .loading import Loader
from .models import Registry
from .store import Store
from .supervisor import Supervisor


@dataclass(slots=True, kw_only=True)
class Lane:
    """`name` is the device's as configured, "" for the best there is.

    A `stand_in` runs only while it serves the models of a device that is lost.
    """

    name: str
    supervisor: Supervisor
    loader: Loader
    dispatcher: Dispatcher
    stand_in: bool
    running: asyncio.Task[None] | None = None

    @property
    def shown(self) -> str:
        """The device for people: its full name once it was seen."""
        return self.supervisor.spec or self.name or "the best device"

    @property
    def state(self) -> str:
        """Of its worker; "resting" for a stand-in that is not needed."""
        running = self.running
        if self.stand_in and (running is None or running.done() or running.cancelling()):
            return "resting"
        return self.supervisor.state

    async def run(self) -> None:
        """Keep a worker until cancelled; no process of the device is left when this returns."""
        try:
            await self.supervisor.run()
        finally:
            await self.loader.builder.kill()

    def worker(self) -> dict[str, Any]:
        """Its process, as ServerStatus shows it."""
        return {
            "state": self.state,
            "pid": self.supervisor.pid,
            "restarts": max(0, self.supervisor.starts - 1),
            "reason": self.supervisor.reason,
        }

    def identity(self) -> dict[str, Any] | None:
        """Of the device; None before it was seen."""
        profile = self.supervisor.profile
        return strict.to_plain(profile.identity) if profile else None

    def peaks(self) -> dict[str, Any] | None:
        """Of the device, as measured; None where they are not known."""
        profile = self.supervisor.profile
        return strict.to_plain(profile.peaks) if profile and profile.peaks else None

    def queue(self) -> dict[str, int]:
        """Requests that wait and run."""
        return {"waiting": self.dispatcher.waiting, "running": self.dispatcher.running}


def make(
    name: str,
    limits: Limits,
    cache_dir: Path,
    registry: Registry,
    store: Store,
    latencies: Latencies,
    *,
    stand_in: bool = False,
) -> Lane:
    """A lane for a device; nothing runs yet."""
    supervisor = Supervisor(limits, cache_dir, name)
    loader = Loader(name, limits, supervisor, registry, store, cache_dir)
    dispatcher = Dispatcher(name, limits, supervisor, registry, loader, latencies)
    return Lane(name=name, supervisor=supervisor, loader=loader, dispatcher=dispatcher, stand_in=stand_in)
