"""What the service knows of itself, as one document of plain data: the method Metrics (docs/metrics.md)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.protocol.errors import InvalidArgument

from . import openmetrics
from .blocking import in_thread
from .deviceserver import DeviceServer
from .gains import Gains
from .idle.thermal import temperatures
from .ledger import Ledger
from .pool import Pool
from .serving.registry import Registry
from .serving.states import ServedModel, State

# The executor enqueues a whole inference and waits once; it times kernels by the device's clock only when a
# profile is asked for, since that slows some drivers down.
DEVICE_TIME = "wall time of inferences in the worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Gathers the figures. `lease` and `gpu_faults` give theirs since the service started."""

    version: str
    started: float  # of time.monotonic
    registry: Registry
    pool: Pool
    ledger: Ledger
    gains: Gains
    connections: Callable[[], int]
    lease: Callable[[], Mapping[str, Any]]
    gpu_faults: Callable[[], Mapping[str, Any]]
    root: Path = Path("/")  # of the file system that has the sensors

    async def answer(self, form: str | None) -> dict[str, Any]:
        """The result of Metrics; raises InvalidArgument for forms there are not."""
        if form not in (None, "", "openmetrics"):
            raise InvalidArgument(
                f"there is no format {form[:40]!r}; use openmetrics, or none for plain data"
            )
        document = await self.document()
        if not form:
            return document
        return {"content_type": openmetrics.CONTENT_TYPE, "text": openmetrics.text(document)}

    async def document(self) -> dict[str, Any]:
        """Every figure; spans in seconds, temperatures in degrees Celsius."""
        tuning = await in_thread(self.gains.now)
        sensors = await in_thread(temperatures, self.root)
        now, default = time.monotonic(), self.pool.default
        uptime = now - self.started
        spent, waiting = self.ledger.plain(), self.pool.waiting()
        return {
            "version": self.version,
            "pid": os.getpid(),
            "time": time.time(),
            "uptime_seconds": uptime,
            "device": default.identity(),
            "device_time": DEVICE_TIME,
            "worker": _worker(default),
            "devices": [
                {"name": each.name, "shown": each.shown, "worker": _worker(each), "queue": _queue(each)}
                for each in self.pool.servers.values()
            ],
            "queue": {
                **self.pool.queue(),
                "longest": max(each.engine.queue.longest for each in self.pool.servers.values()),
            },
            "connections": self.connections(),
            "whole": self.registry.whole.plain(now, uptime),
            "models": [
                _model(entry, now, uptime)
                | {"device": self.pool.of(entry).shown}
                | {"waiting": waiting[entry.name], "spent": spent.get(entry.name, _NOTHING_SPENT)}
                for entry in self.registry.all()
            ],
            "tuning": tuning,
            "temperatures": sensors,
            "lease": dict(self.lease()),
            "gpu_faults": dict(self.gpu_faults()),
        }


_NOTHING_SPENT: Mapping[str, Any] = {"seconds": 0.0, "tasks": {}, "profiled": ""}


def _worker(server: DeviceServer) -> dict[str, Any]:
    supervisor = server.supervisor
    return {
        "state": server.state,
        "reason": supervisor.reason,
        "starts": supervisor.starts,
        "ends": dict(sorted(supervisor.ends.items())),
        "last_ends": list(supervisor.last_ends),
    }


def _queue(server: DeviceServer) -> dict[str, int]:
    return {**server.queue(), "longest": server.engine.queue.longest}


def _model(entry: ServedModel, now: float, uptime: float) -> dict[str, Any]:
    history = entry.manifest.history
    return {
        "name": entry.name,
        "version": history.number,
        "quarantined_versions": sum(bool(version.quarantine) for version in history.versions),
        "sha256": entry.key,
        "state": entry.state.value,
        "ready": entry.state is State.READY,
        "away": entry.away,
        "engine": "cpu" if entry.on_cpu else "gpu",
        **entry.statistics.plain(now, uptime),
    }
