"""The methods of the service (docs/protocol.md, "Methods")."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from honed.protocol import methods, results, service, strict
from honed.protocol.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from honed.protocol.methods import EXTENSIONS, METHODS, VERSION, Method, check_version, parse
from honed.protocol.params import (
    ExportParams,
    HistoryParams,
    InferParams,
    LeaseAskParams,
    LeaseReleaseParams,
    LoadParams,
    MetricsParams,
    ModelParams,
    Nothing,
    PinParams,
    ProfileParams,
    PublishParams,
    RegionName,
    RegionParams,
    RollbackParams,
    TunerReportParams,
    TunerRunParams,
    TunerStopParams,
    UnloadParams,
)
from honed.protocol.results import Done
from honed.runtime.version import own_version

from . import inference, models
from .connection import Connection, WithDescriptors
from .interface import Interface
from .jobs import Jobs
from .leasing import Leasing
from .ledger import Ledger
from .limits import MAX_MESSAGE_DEPTH, MAX_MESSAGE_VALUES, MAX_TEXT_BYTES, Limits
from .metrics import Metrics
from .peers import Policy
from .pool import Pool
from .publishing import Publisher
from .reload import Reloader
from .serving.registry import Registry
from .serving.states import ServedModel, State
from .tunerchild import TunerChild
from .tunerruns import MEASURING, TunerRuns

MAX_PROFILE_RUNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request, by whom, with its number and descriptors."""

    connection: Connection
    msgid: int
    descriptors: list[int]


P = TypeVar("P")
R = TypeVar("R")
Map = dict[str, Any]  # what the serving core makes still
Handler = Callable[["Api", Call, P], Coroutine[Any, Any, R | WithDescriptors[R] | Map | WithDescriptors[Map]]]
_HANDLERS: Final[dict[str, Handler[Any, Any]]] = {}


def _answers(method: Method[P, R]) -> Callable[[Handler[P, R]], Handler[P, R]]:
    """Mark what answers requests for `method`."""

    def mark(handler: Handler[P, R]) -> Handler[P, R]:
        _HANDLERS[method.name] = handler
        return handler

    return mark


class Api:
    """Answers requests; every method raises HonedError for what cannot be done."""

    def __init__(
        self,
        *,
        limits: Limits,
        policy: Policy,
        places: service.Places,
        registry: Registry,
        fleet: Pool,
        jobs: Jobs,
        publisher: Publisher,
        ledger: Ledger,
        metrics: Metrics,
        leasing: Leasing,
        tuner: TunerChild,
        tuner_runs: TunerRuns,
        reloader: Reloader,
        connections: Callable[[], int],
        damaged: list[str],
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._places = places
        self._registry = registry
        self._fleet = fleet
        self._jobs = jobs
        self._publisher = publisher
        self._ledger = ledger
        self._metrics = metrics
        self._leasing = leasing
        self._tuner = tuner
        self._tuner_runs = tuner_runs
        self._reloader = reloader
        self._connections = connections
        self._damaged = damaged
        self._started = time.monotonic()
        self.stopping = False

    def answer(self, call: Call, method: str, params: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """The work for a request, which gives its result; raises HonedError for wrong parameters."""
        known = METHODS.get(method)
        if known is None:
            raise Unimplemented(f"there is no method {method[:80]!r}; docs/protocol.md lists them")
        self._policy.check(call.connection.peer, known.right, method)
        if self.stopping:
            raise Unavailable("the service is stopping; call again when it runs")
        return _HANDLERS[method](self, call, parse(known.params, params))

    @_answers(methods.SERVER_LIVE)
    async def _server_live(self, call: Call, params: Nothing) -> results.Live:
        return results.Live(live=True)

    @_answers(methods.SERVER_READY)
    async def _server_ready(self, call: Call, params: Nothing) -> results.Ready:
        return results.Ready(ready=self._fleet.ready and not self._registry.count(State.LOADING))

    @_answers(methods.SERVER_METADATA)
    async def _server_metadata(self, call: Call, params: Nothing) -> results.ServerMetadata:
        limits = strict.to_plain(self._limits)
        limits |= {
            "max_message_depth": MAX_MESSAGE_DEPTH,
            "max_message_values": MAX_MESSAGE_VALUES,
            "max_text_bytes": MAX_TEXT_BYTES,
        }
        return results.ServerMetadata(
            name="honed", version=own_version(), extensions=EXTENSIONS, limits=limits
        )

    @_answers(methods.SERVER_STATUS)
    async def _server_status(self, call: Call, params: Nothing) -> dict[str, Any]:
        lane = self._fleet.default
        return {
            "name": "honed",
            "version": own_version(),
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - self._started,
            "places": self._places,
            "device": lane.identity(),
            "device_spec": lane.supervisor.spec,
            "peaks": lane.peaks(),
            "worker": lane.worker(),
            "devices": self._fleet.plain(),
            "models": {state.value: self._registry.count(state) for state in State},
            "queue": self._fleet.queue(),
            "connections": self._connections(),
            "jobs": tuple(job.status() for job in self._jobs.active.values()),
            "damaged": self._damaged,
            "idle": self._leasing.idle(),
            "lease": self._leasing.lease(),
            "tuner": self._tuner.status(),
        }

    @_answers(methods.LEASE_ASK)
    async def _lease_ask(self, call: Call, params: LeaseAskParams) -> service.LeaseAsked:
        return self._leasing.ask(call.connection, params.candidate_seconds)

    @_answers(methods.TUNER_REPORT)
    async def _tuner_report(self, call: Call, params: TunerReportParams) -> Done:
        self._tuner.report(call.connection, params.text)
        return Done()

    @_answers(methods.LEASE_RELEASE)
    async def _lease_release(self, call: Call, params: LeaseReleaseParams) -> Done:
        self._leasing.release(call.connection, params.lease or 0)
        return Done()

    @_answers(methods.METRICS)
    async def _show_metrics(self, call: Call, params: MetricsParams) -> dict[str, Any]:
        return await self._metrics.answer(params.format)

    @_answers(methods.CONFIG_SHOW)
    async def _config_show(self, call: Call, params: Nothing) -> service.ConfigShown:
        return await self._reloader.show()

    @_answers(methods.CONFIG_RELOAD)
    async def _config_reload(self, call: Call, params: Nothing) -> service.ConfigReloaded:
        return await self._reloader.reload()

    @_answers(methods.MODEL_READY)
    async def _model_ready(self, call: Call, params: ModelParams) -> results.Ready:
        return results.Ready(ready=self._registry.get(_named(params)).state is State.READY)

    @_answers(methods.MODEL_METADATA)
    async def _model_metadata(self, call: Call, params: ModelParams) -> results.ModelMetadata:
        entry = self._registry.get(_named(params))
        compiled, given = _interfaces(entry)
        shown = given or compiled
        if shown is None:
            self._registry.compiled(entry.name)  # which says why
            raise Unavailable(f"model {entry.name!r} cannot be used: {entry.reason}")
        return results.ModelMetadata(
            name=entry.name,
            versions=(VERSION,),
            platform="onnxruntime_onnx" if entry.on_cpu else "honed_opencl",
            inputs=tuple(map(inference.describe, shown.inputs)),
            outputs=tuple(map(inference.describe, shown.outputs)),
        )

    @_answers(methods.MODEL_STATISTICS)
    async def _model_statistics(self, call: Call, params: ModelParams) -> results.ModelStatistics:
        check_version(params.version)
        entries = [self._registry.get(params.name)] if params.name else self._registry.all()
        return results.ModelStatistics(
            model_stats=tuple(entry.statistics.triton(entry.name) for entry in entries)
        )

    @_answers(methods.MODEL_SHOW)
    async def _model_show(self, call: Call, params: ModelParams) -> dict[str, Any]:
        entry = self._registry.get(_named(params))
        return {
            **models.show(entry, self._fleet.of(entry).identity()),
            "placement": self._fleet.placed(entry),
        }

    @_answers(methods.MODEL_PROFILE)
    async def _model_profile(self, call: Call, params: ProfileParams) -> dict[str, Any]:
        runs = params.parameters.runs if params.parameters and params.parameters.runs is not None else 5
        if not 1 <= runs <= MAX_PROFILE_RUNS:
            raise InvalidArgument(f"runs is {runs}; give 1 to {MAX_PROFILE_RUNS}")
        timeline = bool(params.parameters and params.parameters.timeline)
        entry, _ = self._registry.compiled(params.name)
        if entry.on_cpu:
            raise Unavailable(
                f"the CPU engine serves {entry.name}, which has no kernels to profile; "
                "'hone add --engine gpu' has the compiled form serve"
            )
        with self._leasing.serving(entry.name, call.connection.peer.pid):
            profile = await self._fleet.profile(call.connection.client, entry, runs, timeline=timeline)
        if entry.on_device:
            self._ledger.profiled(entry.name, entry.key, profile["rows"])
        return profile

    @_answers(methods.MODEL_EXPORT)
    async def _model_export(self, call: Call, params: ExportParams) -> WithDescriptors[results.ModelExported]:
        manifest, descriptors = self._jobs.export(params.name)
        result = results.ModelExported(
            files=tuple(file.name for file in manifest.files),
            shapes=dict(manifest.shapes),
            precision=manifest.precision,
            sha256=self._registry.get(params.name).key,
        )
        return WithDescriptors(result, descriptors)

    @_answers(methods.MODEL_INFER)
    async def _model_infer(self, call: Call, params: InferParams) -> dict[str, Any]:
        with self._registry.statistics(params.model_name).request():
            check_version(params.model_version)
            entry = self._registry.get(params.model_name)
            compiled, given = _interfaces(entry)
            if compiled is None and given is None:
                self._registry.compiled(entry.name)
            with self._leasing.serving(entry.name, call.connection.peer.pid):
                plan = inference.check(
                    params,
                    compiled,
                    given,
                    call.connection.regions,
                    max_bytes=self._limits.max_answer_bytes,
                    keep=self._ledger.settings.keep_inputs,
                )
                result = await self._fleet.infer(call.connection.client, entry, plan)
            if self._registry.find(entry.name) is not None and not entry.away:
                self._ledger.ran(entry.name, result["parameters"]["compute_us"] / 1e6)
            return result

    @_answers(methods.MODEL_PUBLISH)
    async def _model_publish(self, call: Call, params: PublishParams) -> dict[str, Any]:
        return await self._publisher.publish(params, call.descriptors)

    @_answers(methods.MODEL_HISTORY)
    async def _model_history(self, call: Call, params: HistoryParams) -> dict[str, Any]:
        return self._publisher.history(params)

    @_answers(methods.MODEL_ROLLBACK)
    async def _model_rollback(self, call: Call, params: RollbackParams) -> dict[str, Any]:
        return await self._publisher.rollback(params)

    @_answers(methods.MODEL_PIN)
    async def _model_pin(self, call: Call, params: PinParams) -> dict[str, Any]:
        return await self._publisher.pin(params)

    @_answers(methods.SHARED_MEMORY_REGISTER)
    async def _region_register(self, call: Call, params: RegionParams) -> Done:
        if len(call.descriptors) != 1:
            raise InvalidArgument(
                f"{len(call.descriptors)} descriptors came with the request; send one, of a memfd"
            )
        call.connection.regions.add(params, call.descriptors[0])
        return Done()

    @_answers(methods.SHARED_MEMORY_STATUS)
    async def _region_status(self, call: Call, params: RegionName) -> results.Regions:
        regions = call.connection.regions.select(params.name)
        return results.Regions(
            regions=tuple(
                results.RegionSpan(name=r.name, offset=r.offset, byte_size=r.byte_size) for r in regions
            )
        )

    @_answers(methods.SHARED_MEMORY_UNREGISTER)
    async def _region_unregister(self, call: Call, params: RegionName) -> Done:
        for region in call.connection.regions.remove(params.name):
            self._fleet.release(region)
        return Done()

    @_answers(methods.TUNER_RUN)
    async def _tuner_run(
        self, call: Call, params: TunerRunParams
    ) -> dict[str, Any] | WithDescriptors[dict[str, Any]]:
        def notify(news: dict[str, Any]) -> None:
            call.connection.notify("Progress", {"msgid": call.msgid, **news})

        if params.command not in MEASURING:
            return await self._tuner_runs.run(params, call.descriptors, notify)
        with self._leasing.adding(call.connection.peer.pid, "a model is being tuned by hand"):
            return await self._tuner_runs.run(params, call.descriptors, notify)

    @_answers(methods.TUNER_STOP)
    async def _tuner_stop(self, call: Call, params: TunerStopParams) -> Done:
        self._tuner_runs.stop(params.model)
        return Done()

    @_answers(methods.REPOSITORY_INDEX)
    async def _repository_index(self, call: Call, params: Nothing) -> results.Index:
        return results.Index(
            models=tuple(
                results.IndexedModel(
                    name=entry.name,
                    version=VERSION,
                    state=entry.state.value,
                    reason=entry.remark,
                    engine="cpu" if entry.on_cpu else "gpu",
                    engine_why=entry.manifest.why,
                )
                for entry in self._registry.all()
            )
        )

    @_answers(methods.REPOSITORY_MODEL_LOAD)
    async def _repository_load(self, call: Call, params: LoadParams) -> results.ModelAdded:
        def notify(progress: dict[str, Any]) -> None:
            call.connection.notify("Progress", {"msgid": call.msgid, **progress})

        meanwhile = self._leasing.adding(call.connection.peer.pid)
        return await self._jobs.add(params, call.descriptors, notify, meanwhile)

    @_answers(methods.REPOSITORY_MODEL_UNLOAD)
    async def _repository_unload(self, call: Call, params: UnloadParams) -> Done:
        await self._jobs.remove(params.model_name)
        self._ledger.forget(params.model_name)
        self._leasing.forget(params.model_name)
        return Done()


def _interfaces(entry: ServedModel) -> tuple[Interface | None, Interface | None]:
    """Of a model's compiled form, and of its file where the CPU engine runs that."""
    compiled = entry.compiled
    closed = inference.closed(compiled.inputs, compiled.outputs) if compiled is not None else None
    return closed, entry.manifest.interface


def _named(params: ModelParams) -> str:
    check_version(params.version)
    if not params.name:
        raise NotFound("name is empty; say which model, 'hone list' shows which there are")
    return params.name
