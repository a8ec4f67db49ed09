"""What is shown of devices, and of where models are."""

from __future__ import annotations

from honed.daemon.apps.viewer import Viewer
from honed.daemon.core.registry import Registry
from honed.daemon.core.states import ServedModel
from honed.daemon.serving.deviceserver import DeviceServer
from honed.daemon.serving.pool import Pool
from honed.protocol.results import ModelPlacement
from honed.protocol.service import DeviceStatus, QueueStatus


def seen(pool: Pool, viewer: Viewer) -> list[DeviceServer]:
    """Device servers that are there for a peer."""
    return [each for each in pool.servers.values() if viewer.sees(each.engine.owner)]


def queue(pool: Pool, viewer: Viewer) -> QueueStatus:
    """Requests of all devices that wait and run."""
    queues = [server.queue() for server in seen(pool, viewer)]
    return QueueStatus(
        waiting=sum(queue.waiting for queue in queues), running=sum(queue.running for queue in queues)
    )


def devices(pool: Pool, registry: Registry, viewer: Viewer) -> tuple[DeviceStatus, ...]:
    """The part `devices` of ServerStatus, as `viewer` may see it."""
    models = [model for model in registry.models() if viewer.sees(model.manifest.owner)]
    return tuple(
        DeviceStatus(
            name=server.name,
            engine=server.kind,
            default=server is pool.default,
            stand_in=server.engine.stand_in and server.kind != "cpu",
            spec=server.supervisor.spec,
            device=server.identity,
            peaks=server.peaks,
            worker=server.worker(),
            queue=server.queue(),
            models=tuple(model.name for model in models if model.engine == server.name),
            away=tuple(model.name for model in models if model.home == server.name and not model.at_home),
        )
        for server in seen(pool, viewer)
    )


def placed(pool: Pool, model: ServedModel) -> ModelPlacement:
    """The part `placement` of ModelShow."""
    manifest = model.manifest
    home = pool.placement.home(model.name, manifest.device, manifest.placed)
    return ModelPlacement(
        device=pool.device_of(model).shown,
        served_by=pool.of(model).shown,
        engine=model.kind,
        why=manifest.why or home.why,
        away=model.away,
        pinned_engine=manifest.pinned_engine,
    )
