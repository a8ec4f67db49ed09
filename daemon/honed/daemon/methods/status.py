"""Reports models, devices and placement. No I/O except for users' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from honed.daemon.core.model import ServedModel, is_cpu, kind_of
from honed.daemon.core.state import Registry, unusable
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.plan import describe
from honed.daemon.serving.pool import EngineManager
from honed.daemon.store.names import Viewer
from honed.daemon.transport.access import user_name
from honed.protocol import strict
from honed.protocol.methods import VERSION
from honed.protocol.results import IndexedModel, ModelPlacement, ModelShown, ModelSource
from honed.protocol.service import DeviceStatus, QueueStatus
from honed.protocol.values import ENGINE_NAMES, DeviceIdentity

_RESTING = DeviceIdentity(platform="ONNX Runtime", vendor="", name="CPU", driver_version="", kernel_driver="")
# Fields that `more` of `show` may lack.
_OF_FEATURES: Final = ("variants", "sequence_state", "forms", "apps")


def show(entry: ServedModel, pool: EngineManager, more: Mapping[str, Any]) -> ModelShown:
    """Return the result of ModelShow with `more` fields; raise Unavailable if the file is not readable."""
    model, manifest = entry.compiled, entry.manifest
    identity, interface = pool.of(entry).identity, manifest.interface
    values: dict[str, Any] = {
        "name": entry.name,
        "state": entry.state.value,
        "reason": entry.remark,
        "added": manifest.added,
        "shapes": manifest.shapes,
        "precision": manifest.precision,
        "placement": placement_of(pool, entry),
        "settings": manifest.settings,
        "optimisation": manifest.optimisation,
        "broke_preconditions": entry.statistics.preconditions,
        **more,
    }
    if identity is None and entry.on_cpu:  # An engine that rests
        identity = _RESTING
    if model is None and entry.on_cpu and interface is not None and identity is not None:
        source = manifest.sources[0]
        return ModelShown(
            sha256=source.sha256,
            bytes=sum(file.nbytes for file in manifest.sources),
            source=ModelSource(
                sha256=source.sha256,
                filename=source.name,
                producer=interface.producer,
                opset=interface.opset,
                precision="as given",
                choice=None,
            ),
            device=identity,
            inputs=tuple(map(describe, interface.inputs)),
            outputs=tuple(map(describe, interface.outputs)),
            **values,
        )
    if model is None or manifest.compiled is None:
        raise unusable(entry.name, entry.reason)
    return strict.copy_fields(
        ModelShown,
        model,
        *_OF_FEATURES,
        sha256=manifest.compiled.sha256,
        bytes=manifest.compiled.nbytes,
        source=strict.copy_fields(ModelSource, model.source),
        notes=model.source.notes,
        inputs=tuple(map(describe, model.inputs)),
        outputs=tuple(map(describe, model.outputs)),
        checked=entry.checked,
        parts=model.parts,
        **values,
    )


def index_row(
    entry: ServedModel, variants: int, pool: EngineManager, more: Mapping[str, Any]
) -> IndexedModel:
    """Return a row of RepositoryIndex with `more` fields."""
    owner = entry.manifest.owner
    return IndexedModel(
        name=entry.name,
        version=VERSION,
        state=entry.state.value,
        reason=entry.remark,
        engine=entry.kind,
        engine_why=entry.manifest.decision.reason,
        variants=variants,
        pinned_engine=entry.manifest.decision.pinned_engine,
        owner=user_name(owner) if owner is not None else "",
        engine_name=ENGINE_NAMES[entry.kind],
        device=pool.of(entry).label,
        **more,
    )


def servers_seen(pool: EngineManager, viewer: Viewer) -> list[EngineServer]:
    """Return the engines that a peer may see."""
    return [each for each in pool.servers.values() if viewer.sees(each.engine.owner)]


def queue_status(pool: EngineManager, viewer: Viewer) -> QueueStatus:
    """Return the numbers of waiting and running requests on the devices that `viewer` may see."""
    queues = [server.queue() for server in servers_seen(pool, viewer)]
    return QueueStatus(
        waiting=sum(queue.waiting for queue in queues), running=sum(queue.running for queue in queues)
    )


def device_statuses(pool: EngineManager, registry: Registry, viewer: Viewer) -> tuple[DeviceStatus, ...]:
    """Return the field `devices` of ServerStatus, as `viewer` may see it."""
    models = [model for model in registry.models() if viewer.sees(model.manifest.owner)]
    return tuple(
        DeviceStatus(
            name=server.name,
            engine=kind_of(server.name),
            default=server is pool.default,
            stand_in=server.engine.on_demand and not is_cpu(server.name),
            spec=server.engine.spec,
            device=server.identity,
            peaks=server.peaks,
            worker=server.worker(),
            queue=server.queue(),
            models=tuple(model.name for model in models if model.engine == server.name),
            away=tuple(
                model.name
                for model in models
                if model.preferred_engine == server.name and not model.on_preferred_engine
            ),
            engine_name=ENGINE_NAMES[kind_of(server.name)],
        )
        for server in servers_seen(pool, viewer)
    )


def placement_of(pool: EngineManager, model: ServedModel) -> ModelPlacement:
    """Return the field `placement` of ModelShow."""
    manifest = model.manifest
    home = pool.placement.home(model.name, manifest.device, manifest.placement_reason)
    return ModelPlacement(
        device=pool.device_of(model).label,
        served_by=pool.of(model).label,
        engine=model.kind,
        why=manifest.decision.reason or home.why,
        away=model.failover_reason,
        pinned_engine=manifest.decision.pinned_engine,
        engine_name=ENGINE_NAMES[model.kind],
    )
