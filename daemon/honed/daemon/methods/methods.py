"""Handles the methods of the service (docs/protocol.md, "Methods")."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from honed.daemon.aio import Driven
from honed.daemon.changes.add import ModelInstaller
from honed.daemon.changes.change import Changes
from honed.daemon.changes.publish import Publisher
from honed.daemon.changes.settings import change_settings
from honed.daemon.config import Reloader
from honed.daemon.core.model import State
from honed.daemon.core.state import Registry
from honed.daemon.feature import Feature, Handler, MethodCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving import plan
from honed.daemon.serving.pool import EngineManager
from honed.daemon.settings import places
from honed.daemon.settings.schema import MAX_MESSAGE_DEPTH, MAX_MESSAGE_VALUES, MAX_TEXT_BYTES, Limits
from honed.daemon.store.names import NOBODYS, Viewer, is_own, model_of, naming_field, with_model_name
from honed.daemon.transport.access import Policy
from honed.daemon.transport.connection import Connection, WithDescriptors, Work
from honed.daemon.tuning.process import TunerChild
from honed.protocol import methods, results, service, strict
from honed.protocol.errors import HonedError, InvalidArgument, NotFound, Unimplemented
from honed.protocol.methods import EXTENSIONS, METHODS, VERSION, Method, Permission, check_version
from honed.protocol.params import (
    MEASURING,
    ExportParams,
    HistoryParams,
    LeaseAskParams,
    LeaseReleaseParams,
    LoadParams,
    ModelParams,
    Nothing,
    ProfileParams,
    RegionName,
    RegionParams,
    SetParams,
    TunerReportParams,
    TunerRunParams,
    TunerStopParams,
    UnloadParams,
)
from honed.protocol.peer import RequestReceived
from honed.protocol.service import MetricsText
from honed.protocol.strict import Map
from honed.protocol.values import ENGINE_NAMES, Empty, ModelProfile
from honed.runtime import HONED_VERSION

if TYPE_CHECKING:
    from honed.daemon.tuning.runs import TunerRuns

from . import status
from .metrics import MetricsCollector
from .pipeline import InferencePipeline

MAX_PROFILE_RUNS = 100


P = TypeVar("P")
R = TypeVar("R")
_Handler = Callable[
    ["Api", MethodCall, P], Coroutine[Any, Any, R | WithDescriptors[R] | MetricsText | Map] | Driven[Any]
]
_HANDLERS: Final[dict[str, _Handler[Any, Any]]] = {}


def _answers(method: Method[P, R]) -> Callable[[_Handler[P, R]], _Handler[P, R]]:
    """Register a handler of requests for `method`; before it is awaited, it may only raise HonedError."""

    def mark(handler: _Handler[P, R]) -> _Handler[P, R]:
        _HANDLERS[method.name] = handler
        return handler

    return mark


class _Row(NamedTuple):
    """A method as the service answers it; `field` of its parameters names a model."""

    right: Permission
    params: type[Any]
    field: str | None
    handler: Handler[Any, Any]

    @classmethod
    def of(cls, method: Method[Any, Any], handler: Handler[Any, Any]) -> Self:
        """Return the row of a method and its handler."""
        return cls(method.right, method.params, naming_field(method.params), handler)


@dataclass(slots=True, kw_only=True, eq=False)
class Api:
    """The handlers of all methods; they raise HonedError if they cannot answer."""

    limits: Limits
    policy: Policy
    places: service.ServicePlaces
    registry: Registry
    engines: EngineManager
    changes: Changes
    installer: ModelInstaller
    publisher: Publisher
    usage_log: UsageLog
    pipeline: InferencePipeline
    metrics: MetricsCollector
    leasing: Leasing
    tuner: TunerChild
    tuner_runs: Callable[[], TunerRuns]
    reloader: Reloader
    features: Sequence[Feature]
    connections: Callable[[], int]
    damaged: list[str]
    _started: float = field(init=False, default_factory=time.monotonic)
    _rows: dict[str, _Row] = field(init=False)

    def __post_init__(self) -> None:
        handlers: dict[str, Handler[Any, Any]] = {
            name: partial(handler, self) for name, handler in _HANDLERS.items()
        }
        for feature in self.features:
            handlers.update(feature.methods())
        self._rows = {name: _Row.of(METHODS[name], handler) for name, handler in handlers.items()}

    def answer(self, connection: Connection, request: RequestReceived) -> Work:
        """Return the work that answers a request; raise HonedError if it is invalid or not permitted."""
        method = request.method
        row = self._rows.get(method)
        if row is None:
            raise Unimplemented(f"there is no method {method[:80]!r}; docs/protocol.md lists them")
        right, kind, field, handler = row
        peer = connection.peer
        self.policy.check(peer, right, method)
        self.pipeline.check_running()
        try:
            parsed = strict.from_plain(kind, request.params, where="params", none_omitted=True)
        except strict.SchemaError as error:
            raise InvalidArgument(f"{error}; see docs/protocol.md for what this method takes") from error
        call = MethodCall(connection=connection, msgid=request.msgid, descriptors=request.descriptors)
        name = getattr(parsed, field) if field is not None else None
        own = name if name is not None and is_own(name) else None
        if own is None and right is not Permission.OWN:
            return handler(call, parsed)
        entry = self.registry.find(model_of(own)) if own is not None else None
        owner = entry.manifest.owner if entry is not None else None
        if right is Permission.OWN and owner != peer.uid:
            self.policy.check(peer, Permission.CHANGE, method)
        viewer = self.policy.viewer(peer)
        # An unused name may belong to another user by the time the handler runs.
        if field is None or own is None or viewer.all or (entry is not None and viewer.sees(owner)):
            return handler(call, parsed)
        return self._as_nobodys(handler, call, parsed, field, own)

    async def _as_nobodys(
        self, handler: Handler[P, R], call: MethodCall, params: P, field: str, name: str
    ) -> R | WithDescriptors[R] | MetricsText | Map:
        """Answer a request for another user's model exactly as one for an unused name.

        The request takes the same path through the service, so that the answer does not reveal the model.
        """
        nobodys = NOBODYS + name.removeprefix(model_of(name))
        try:
            work = handler(call, with_model_name(params, field, nobodys))
            answer: R | WithDescriptors[R] | MetricsText | Map = await work
            return answer
        except HonedError as error:
            error.args = tuple(str(each).replace(NOBODYS, model_of(name)) for each in error.args)
            raise

    @_answers(methods.SERVER_LIVE)
    async def _server_live(self, call: MethodCall, params: Nothing) -> results.Live:
        return results.Live(live=True)

    @_answers(methods.SERVER_READY)
    async def _server_ready(self, call: MethodCall, params: Nothing) -> results.Ready:
        loading = self.registry.count(State.LOADING, self._viewer(call))
        return results.Ready(ready=self.engines.ready and not loading)

    @_answers(methods.SERVER_METADATA)
    async def _server_metadata(self, call: MethodCall, params: Nothing) -> results.ServerMetadata:
        limits = strict.to_plain(self.limits)
        limits |= {
            "max_message_depth": MAX_MESSAGE_DEPTH,
            "max_message_values": MAX_MESSAGE_VALUES,
            "max_text_bytes": MAX_TEXT_BYTES,
        }
        return results.ServerMetadata(
            name="honed", version=HONED_VERSION, extensions=EXTENSIONS, limits=limits
        )

    @_answers(methods.SERVER_STATUS)
    async def _server_status(self, call: MethodCall, params: Nothing) -> service.Status:
        default, viewer = self.engines.default, self._viewer(call)
        own = self.registry.own_names(viewer)
        idle = self.leasing.idle()
        jobs = [job.status() for job in self.changes.active.values() if viewer.sees(job.owner)]
        return service.Status(
            name="honed",
            version=HONED_VERSION,
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - self._started,
            places=self.places,
            device=default.identity,
            device_spec=default.engine.spec,
            peaks=default.peaks,
            worker=default.worker(),
            devices=status.device_statuses(self.engines, self.registry, viewer),
            models={state.value: self.registry.count(state, viewer) for state in State},
            queue=status.queue_status(self.engines, viewer),
            connections=self.connections(),
            jobs=tuple(jobs),
            damaged=tuple(viewer.hide_names(each, own) for each in self.damaged),
            idle=dataclasses.replace(idle, models=self._visible_figures(viewer, idle.models)),
            lease=viewer.veil(self.leasing.lease(), own),
            tuner=viewer.veil(self.tuner.status(), own),
            hints=self.tuner.figures.hints if self.tuner.figures is not None else {},
            **_merge_fields(feature.status() for feature in self.features),
        )

    @_answers(methods.LEASE_ASK)
    async def _lease_ask(self, call: MethodCall, params: LeaseAskParams) -> service.LeaseAsked:
        return self.leasing.ask(call.connection, params.candidate_seconds)

    @_answers(methods.TUNER_REPORT)
    async def _tuner_report(self, call: MethodCall, params: TunerReportParams) -> Empty:
        self.tuner.report(call.connection, params)
        if places.compiler():
            self.installer.compiler_came()
        return Empty()

    @_answers(methods.LEASE_RELEASE)
    async def _lease_release(self, call: MethodCall, params: LeaseReleaseParams) -> Empty:
        self.leasing.release(call.connection, params.lease or 0)
        return Empty()

    @_answers(methods.MODEL_READY)
    async def _model_ready(self, call: MethodCall, params: ModelParams) -> results.Ready:
        return results.Ready(ready=self.registry.model(_require_name(params)).state is State.READY)

    @_answers(methods.MODEL_METADATA)
    async def _model_metadata(self, call: MethodCall, params: ModelParams) -> results.ModelMetadata:
        entry = self.registry.model(_require_name(params))
        compiled, given = self.registry.interfaces(entry)
        shown = given or compiled
        assert shown is not None
        return results.ModelMetadata(
            name=entry.name,
            versions=(VERSION,),
            platform="onnxruntime_onnx" if entry.on_cpu else "honed_opencl",
            inputs=tuple(map(plan.describe, shown.inputs)),
            outputs=tuple(map(plan.describe, shown.outputs)),
        )

    @_answers(methods.MODEL_STATISTICS)
    async def _model_statistics(self, call: MethodCall, params: ModelParams) -> results.ModelStatistics:
        check_version(params.version)
        entries = (
            [self.registry.model(params.name)] if params.name else self.registry.models(self._viewer(call))
        )
        return results.ModelStatistics(
            model_stats=tuple(
                e.statistics.triton(e.name, ENGINE_NAMES[e.kind], self.engines.of(e).label) for e in entries
            )
        )

    @_answers(methods.MODEL_SHOW)
    async def _model_show(self, call: MethodCall, params: ModelParams) -> results.ModelShown:
        entry = self.registry.entry(_require_name(params))
        return status.show(
            entry, self.engines, _merge_fields(feature.show_fields(entry) for feature in self.features)
        )

    @_answers(methods.MODEL_PROFILE)
    async def _model_profile(self, call: MethodCall, params: ProfileParams) -> ModelProfile:
        runs = params.parameters.runs if params.parameters and params.parameters.runs is not None else 5
        if not 1 <= runs <= MAX_PROFILE_RUNS:
            raise InvalidArgument(f"runs is {runs}; give 1 to {MAX_PROFILE_RUNS}")
        timeline = bool(params.parameters and params.parameters.timeline)
        self.engines.wake(params.name)
        entry = self.registry.entry(params.name)
        if not entry.on_cpu:
            self.registry.require_compiled(params.name)
        with self.leasing.serving(entry.name, call.connection.peer.pid):
            client, asking = call.connection.client, self.engines.requests
            profile = await asking.profile(client, entry, runs, timeline=timeline)
        if entry.on_device:
            self.usage_log.record_profile(entry.name, entry.key, profile.rows)
        return profile

    @_answers(methods.MODEL_EXPORT)
    async def _model_export(
        self, call: MethodCall, params: ExportParams
    ) -> WithDescriptors[results.ModelExported]:
        manifest, descriptors = self.installer.export(params.name)
        result = results.ModelExported(
            files=tuple(file.name for file in manifest.files),
            shapes=dict(manifest.shapes),
            precision=manifest.precision,
            sha256=self.registry.entry(params.name).key,
        )
        return WithDescriptors(result, descriptors)

    @_answers(methods.MODEL_HISTORY)
    async def _model_history(self, call: MethodCall, params: HistoryParams) -> results.ModelHistory:
        return self.publisher.history(params)

    @_answers(methods.SHARED_MEMORY_REGISTER)
    async def _region_register(self, call: MethodCall, params: RegionParams) -> Empty:
        if len(call.descriptors) != 1:
            raise InvalidArgument(
                f"{len(call.descriptors)} descriptors came with the request; send one, of a memfd"
            )
        call.connection.regions.add(params, call.descriptors[0])
        return Empty()

    @_answers(methods.SHARED_MEMORY_STATUS)
    async def _region_status(self, call: MethodCall, params: RegionName) -> results.Regions:
        regions = call.connection.regions.select(params.name)
        return results.Regions(
            regions=tuple(strict.copy_fields(results.RegionSpan, region) for region in regions)
        )

    @_answers(methods.SHARED_MEMORY_UNREGISTER)
    async def _region_unregister(self, call: MethodCall, params: RegionName) -> Empty:
        for region in call.connection.regions.remove(params.name):
            self.engines.requests.release(region)
        return Empty()

    @_answers(methods.TUNER_RUN)
    async def _tuner_run(
        self, call: MethodCall, params: TunerRunParams
    ) -> service.TunerRan | WithDescriptors[service.TunerRan]:
        if params.command not in MEASURING:
            return await self.tuner_runs().run(params, call.descriptors, call.progress)
        with self.leasing.adding(call.connection.peer.pid, "a model is being tuned by hand"):
            return await self.tuner_runs().run(params, call.descriptors, call.progress)

    @_answers(methods.TUNER_STOP)
    async def _tuner_stop(self, call: MethodCall, params: TunerStopParams) -> Empty:
        self.tuner_runs().stop(params.model)
        return Empty()

    @_answers(methods.REPOSITORY_INDEX)
    async def _repository_index(self, call: MethodCall, params: Nothing) -> results.ModelIndex:
        return results.ModelIndex(
            models=tuple(
                status.index_row(
                    entry,
                    len(self.registry.variants(entry.name)),
                    self.engines,
                    _merge_fields(feature.index_fields(entry) for feature in self.features),
                )
                for entry in self.registry.models(self._viewer(call))
            )
        )

    @_answers(methods.REPOSITORY_MODEL_LOAD)
    async def _repository_load(self, call: MethodCall, params: LoadParams) -> results.ModelAdded:
        options = params.parameters
        if options and options.variants and not any(each.makes_variants for each in self.features):
            raise Unimplemented("this service compiles no variants; add the model for one set of shapes")
        meanwhile = self.leasing.adding(call.connection.peer.pid)
        added = await self.installer.add(params, call.descriptors, call.progress, meanwhile)
        more_notes = [note for feature in self.features for note in await feature.on_added(call, params)]
        return dataclasses.replace(added, notes=(*added.notes, *more_notes)) if more_notes else added

    @_answers(methods.MODEL_SET)
    async def _model_set(self, call: MethodCall, params: SetParams) -> results.ModelSettings:
        return await change_settings(self.changes, self.registry.model(params.name), params)

    @_answers(methods.REPOSITORY_MODEL_UNLOAD)
    async def _repository_unload(self, call: MethodCall, params: UnloadParams) -> Empty:
        await self.installer.remove(params.model_name)
        return Empty()

    def _viewer(self, call: MethodCall) -> Viewer:
        return self.policy.viewer(call.connection.peer)

    def _visible_figures(self, viewer: Viewer, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures of models that the viewer may see."""
        hidden = {e.name for e in self.registry.models() if not viewer.sees(e.manifest.owner)}
        return {name: figure for name, figure in figures.items() if name not in hidden}


def _merge_fields(parts: Iterable[Mapping[str, object]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _require_name(params: ModelParams) -> str:
    check_version(params.version)
    if not params.name:
        raise NotFound("name is empty; say which model, 'hone list' shows which there are")
    return params.name


_answers(methods.METRICS)(lambda api, call, params: api.metrics.answer(params.format, api._viewer(call)))
_answers(methods.CONFIG_SHOW)(lambda api, _, __: api.reloader.show())
_answers(methods.CONFIG_RELOAD)(lambda api, _, __: api.reloader.reload())
_answers(methods.MODEL_INFER)(lambda api, call, params: api.pipeline.infer(call, params))
_answers(methods.MODEL_PREPARE)(lambda api, call, params: api.pipeline.prepare(call.connection, params))
_answers(methods.MODEL_RUN)(lambda api, call, params: api.pipeline.run(call, params))
_answers(methods.MODEL_PUBLISH)(lambda api, call, params: api.publisher.publish(params, call.descriptors))
_answers(methods.MODEL_ROLLBACK)(lambda api, _, params: api.publisher.rollback(params))
_answers(methods.MODEL_PIN)(lambda api, _, params: api.publisher.pin(params))
_answers(methods.HINTS_EXPORT)(
    lambda api, _, params: api.tuner_runs().export_hints(spread=bool(params.spread))
)
_answers(methods.HINTS_IMPORT)(
    lambda api, call, params: api.tuner_runs().import_hints(params, call.descriptors)
)
