"""Collects the service's figures in a document: the method Metrics (docs/metrics.md)."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from honed.daemon.aio import in_thread
from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.state import Registry
from honed.daemon.idle.signals import temperatures
from honed.daemon.observe import openmetrics
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.pool import EngineManager
from honed.daemon.store.names import Viewer, is_own, model_of
from honed.daemon.tuning.process import TunerChild
from honed.protocol import service, strict
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import TuningFigures
from honed.protocol.service import (
    DeviceFigures,
    FaultFigures,
    LeaseFigures,
    MetricsText,
    ModelFigures,
    QueueFigures,
    TimeSpent,
    WorkerFigures,
)
from honed.protocol.values import ENGINE_NAMES
from honed.runtime import HONED_VERSION

from .status import queue_status, servers_seen

# The executor enqueues a whole inference and waits once; it times kernels by the device's clock only when a
# profile is asked for, since that slows some drivers down.
DEVICE_TIME = "wall time of inferences in the worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsCollector:
    """A collector of figures; `lease` and `gpu_faults` return theirs since the service started."""

    started: float  # Start of the service (time.monotonic)
    registry: Registry
    pool: EngineManager
    usage_log: UsageLog
    tuner: TunerChild
    connections: Callable[[], int]
    lease: Callable[[], LeaseFigures]
    gpu_faults: Callable[[], FaultFigures]

    async def answer(self, form: str | None, viewer: Viewer) -> service.Metrics | MetricsText:
        """Return the result of Metrics for a peer; raise InvalidArgument for an unknown format."""
        if form not in (None, "", "openmetrics"):
            raise InvalidArgument(
                f"there is no format {form[:40]!r}; use openmetrics, or none for plain data"
            )
        document = await self.document(viewer)
        if not form:
            return document
        return MetricsText(content_type=openmetrics.CONTENT_TYPE, text=openmetrics.text(document))

    async def document(self, viewer: Viewer) -> service.Metrics:
        """Return every figure that a peer may see; spans in seconds, temperatures in degrees Celsius."""
        tuning = self.tuner.figures
        sensors = await in_thread(temperatures)
        now, default = time.monotonic(), self.pool.default
        uptime, usage, waiting = now - self.started, self.usage_log.usage(), self.pool.waiting()
        with_variants = Counter[str]()
        for name, count in waiting.items():
            with_variants[model_of(name)] += count
        whole = self.registry.all_statistics if viewer.all else self.registry.shared_statistics
        own = self.registry.own_names(viewer)
        return service.Metrics(
            version=HONED_VERSION,
            pid=os.getpid(),
            time=time.time(),
            uptime_seconds=uptime,
            device=default.identity,
            device_time=DEVICE_TIME,
            worker=viewer.veil(_worker(default), own),
            devices=self._devices(viewer, own),
            queue=strict.copy_fields(
                QueueFigures,
                queue_status(self.pool, viewer),
                longest=max(each.engine.queue.longest for each in servers_seen(self.pool, viewer)),
            ),
            connections=self.connections(),
            whole=whole.figures(now, uptime),
            models=tuple(
                self._model(entry, now, uptime, with_variants[entry.name], usage)
                for entry in self.registry.models(viewer)
            ),
            variants=tuple(
                self._model(entry, now, uptime, waiting[entry.name], usage)
                for entry in self.registry.variants()
                if viewer.sees(entry.manifest.owner)
            ),
            tuning=_visible_figures(tuning, viewer, own),
            temperatures=sensors,
            lease=self.lease(),
            gpu_faults=self.gpu_faults(),
        )

    def _devices(self, viewer: Viewer, own: frozenset[str]) -> tuple[DeviceFigures, ...]:
        return tuple(
            DeviceFigures(
                name=each.name,
                shown=each.label,
                worker=viewer.veil(_worker(each), own),
                queue=strict.copy_fields(QueueFigures, each.queue(), longest=each.engine.queue.longest),
            )
            for each in servers_seen(self.pool, viewer)
        )

    def _model(
        self, entry: ServedModel, now: float, uptime: float, waiting: int, usage: Mapping[str, TimeSpent]
    ) -> ModelFigures:
        history, figures = entry.manifest.history, entry.statistics.figures(now, uptime)
        return strict.copy_fields(
            ModelFigures,
            figures,
            name=entry.name,
            version=history.number,
            quarantined_versions=sum(bool(version.quarantine) for version in history.versions),
            sha256=entry.key,
            state=entry.state.value,
            ready=entry.state is State.READY,
            away=entry.failover_reason,
            engine=entry.kind,
            engine_name=ENGINE_NAMES[entry.kind],
            device=self.pool.of(entry).label,
            waiting=waiting,
            spent=usage.get(entry.name, _UNUSED),
        )


def _visible_figures(
    tuning: TuningFigures | None, viewer: Viewer, own: frozenset[str]
) -> TuningFigures | None:
    """Return tuning figures without those of models that the peer may not see."""
    if tuning is None or viewer.all:
        return tuning
    gains = {name: gain for name, gain in tuning.gains.items() if not is_own(name) or model_of(name) in own}
    return viewer.veil(dataclasses.replace(tuning, gains=gains), own)


_UNUSED = TimeSpent(seconds=0.0, tasks={}, profiled="")


def _worker(server: EngineServer) -> WorkerFigures:
    supervisor = server.supervisor
    return WorkerFigures(
        state=server.engine.state,
        reason=server.engine.reason,
        starts=supervisor.starts,
        ends=dict(sorted(supervisor.ends.items())),
        last_ends=tuple(supervisor.last_ends),
    )
