"""The methods of the service (docs/protocol.md, "Methods")."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime import strict
from honed.runtime.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from honed.runtime.protocol import (
    EXTENSIONS,
    METHODS,
    VERSION,
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
    check_version,
    parse,
)
from honed.runtime.version import own_version

from . import inference, models
from .connection import Connection, WithDescriptors
from .fleet import Fleet
from .jobs import Jobs
from .leasing import Leasing
from .ledger import Ledger
from .limits import MAX_MESSAGE_DEPTH, MAX_MESSAGE_VALUES, MAX_TEXT_BYTES, Limits
from .metrics import Metrics
from .models import Registry, State
from .peers import Policy
from .publishing import Publisher
from .reload import Reloader
from .tunerchild import TunerChild
from .tunerruns import MEASURING, TunerRuns

MAX_PROFILE_RUNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where this service keeps its things, as ServerStatus shows them."""

    socket: Path
    state_dir: Path
    cache_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request, by whom, with its number and descriptors."""

    connection: Connection
    msgid: int
    descriptors: list[int]


class Api:
    """Answers requests; every method raises HonedError for what cannot be done."""

    def __init__(
        self,
        *,
        limits: Limits,
        policy: Policy,
        places: Places,
        registry: Registry,
        fleet: Fleet,
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

    def answer(
        self, call: Call, method: str, params: dict[str, Any]
    ) -> Coroutine[Any, Any, dict[str, Any] | WithDescriptors]:
        """The work for a request, which gives its result; raises HonedError for wrong parameters."""
        known = METHODS.get(method)
        if known is None:
            raise Unimplemented(f"there is no method {method[:80]!r}; docs/protocol.md lists them")
        self._policy.check(call.connection.peer, known.right, method)
        if self.stopping:
            raise Unavailable("the service is stopping; call again when it runs")
        return self._METHODS[method](self, call, parse(known.params, params))

    async def _server_live(self, call: Call, params: Nothing) -> dict[str, Any]:
        return {"live": True}

    async def _server_ready(self, call: Call, params: Nothing) -> dict[str, Any]:
        return {"ready": self._fleet.ready and not self._registry.count(State.LOADING)}

    async def _server_metadata(self, call: Call, params: Nothing) -> dict[str, Any]:
        limits = strict.to_plain(self._limits)
        limits |= {
            "max_message_depth": MAX_MESSAGE_DEPTH,
            "max_message_values": MAX_MESSAGE_VALUES,
            "max_text_bytes": MAX_TEXT_BYTES,
        }
        return {"name": "honed", "version": own_version(), "extensions": list(EXTENSIONS), "limits": limits}

    async def _server_status(self, call: Call, params: Nothing) -> dict[str, Any]:
        lane = self._fleet.default
        return {
            "name": "honed",
            "version": own_version(),
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - self._started,
            "places": {name: str(path) for name, path in strict.to_plain(self._places).items()},
            "device": lane.identity(),
            "device_spec": lane.supervisor.spec,
            "peaks": lane.peaks(),
            "worker": lane.worker(),
            "devices": self._fleet.plain(),
            "models": {state.value: self._registry.count(state) for state in State},
            "queue": self._fleet.queue(),
            "connections": self._connections(),
            "jobs": [job.plain() for job in self._jobs.active.values()],
            "damaged": self._damaged,
            "idle": self._leasing.idle(),
            "lease": self._leasing.lease(),
            "tuner": self._tuner.plain(),
        }

    async def _lease_ask(self, call: Call, params: LeaseAskParams) -> dict[str, Any]:
        return self._leasing.ask(call.connection, params.candidate_seconds)

    async def _tuner_report(self, call: Call, params: TunerReportParams) -> dict[str, Any]:
        self._tuner.report(call.connection, params.text)
        return {}

    async def _lease_release(self, call: Call, params: LeaseReleaseParams) -> dict[str, Any]:
        return self._leasing.release(call.connection, params.lease or 0)

    async def _show_metrics(self, call: Call, params: MetricsParams) -> dict[str, Any]:
        return await self._metrics.answer(params.format)

    async def _config_show(self, call: Call, params: Nothing) -> dict[str, Any]:
        return await self._reloader.show()

    async def _config_reload(self, call: Call, params: Nothing) -> dict[str, Any]:
        return await self._reloader.reload()

    async def _model_ready(self, call: Call, params: ModelParams) -> dict[str, Any]:
        return {"ready": self._registry.get(_named(params)).state is State.READY}

    async def _model_metadata(self, call: Call, params: ModelParams) -> dict[str, Any]:
        entry, model = self._registry.compiled(_named(params))
        return {
            "name": entry.name,
            "versions": [VERSION],
            "platform": "honed_opencl",
            "inputs": [inference.describe(tensor) for tensor in model.inputs],
            "outputs": [inference.describe(tensor) for tensor in model.outputs],
        }

    async def _model_statistics(self, call: Call, params: ModelParams) -> dict[str, Any]:
        check_version(params.version)
        entries = [self._registry.get(params.name)] if params.name else self._registry.all()
        return {"model_stats": [entry.statistics.triton(entry.name) for entry in entries]}

    async def _model_show(self, call: Call, params: ModelParams) -> dict[str, Any]:
        entry = self._registry.get(_named(params))
        return {**models.show(entry), "placement": self._fleet.placed(entry)}

    async def _model_profile(self, call: Call, params: ProfileParams) -> dict[str, Any]:
        runs = params.parameters.runs if params.parameters and params.parameters.runs is not None else 5
        if not 1 <= runs <= MAX_PROFILE_RUNS:
            raise InvalidArgument(f"runs is {runs}; give 1 to {MAX_PROFILE_RUNS}")
        timeline = bool(params.parameters and params.parameters.timeline)
        entry, _ = self._registry.compiled(params.name)
        with self._leasing.serving(entry.name, call.connection.peer.pid):
            profile = await self._fleet.profile(call.connection.client, entry, runs, timeline=timeline)
        if entry.at_home:
            self._ledger.profiled(entry.name, entry.key, profile["rows"])
        return profile

    async def _model_export(self, call: Call, params: ExportParams) -> WithDescriptors:
        manifest, descriptors = self._jobs.export(params.name)
        result = {
            "files": [file.name for file in (manifest.compiled, *manifest.sources)],
            "shapes": {name: list(shape) for name, shape in manifest.shapes.items()},
            "precision": manifest.precision,
            "sha256": manifest.compiled.sha256,
        }
        return WithDescriptors(result, descriptors)

    async def _model_infer(self, call: Call, params: InferParams) -> dict[str, Any]:
        with self._registry.statistics(params.model_name).request():
            check_version(params.model_version)
            entry, model = self._registry.compiled(params.model_name)
            with self._leasing.serving(entry.name, call.connection.peer.pid):
                plan = inference.check(
                    params,
                    model.inputs,
                    model.outputs,
                    call.connection.regions,
                    max_bytes=self._limits.max_answer_bytes,
                    keep=self._ledger.settings.keep_inputs,
                )
                result = await self._fleet.infer(call.connection.client, entry, plan)
            if self._registry.find(entry.name) is not None and entry.at_home:
                self._ledger.ran(entry.name, result["parameters"]["compute_us"] / 1e6)
            return result

    async def _model_publish(self, call: Call, params: PublishParams) -> dict[str, Any]:
        return await self._publisher.publish(params, call.descriptors)

    async def _model_history(self, call: Call, params: HistoryParams) -> dict[str, Any]:
        return self._publisher.history(params)

    async def _model_rollback(self, call: Call, params: RollbackParams) -> dict[str, Any]:
        return await self._publisher.rollback(params)

    async def _model_pin(self, call: Call, params: PinParams) -> dict[str, Any]:
        return await self._publisher.pin(params)

    async def _region_register(self, call: Call, params: RegionParams) -> dict[str, Any]:
        if len(call.descriptors) != 1:
            raise InvalidArgument(
                f"{len(call.descriptors)} descriptors came with the request; send one, of a memfd"
            )
        call.connection.regions.add(params, call.descriptors[0])
        return {}

    async def _region_status(self, call: Call, params: RegionName) -> dict[str, Any]:
        regions = call.connection.regions.select(params.name)
        return {"regions": [{"name": r.name, "offset": r.offset, "byte_size": r.byte_size} for r in regions]}

    async def _region_unregister(self, call: Call, params: RegionName) -> dict[str, Any]:
        for region in call.connection.regions.remove(params.name):
            self._fleet.release(region)
        return {}

    async def _tuner_run(self, call: Call, params: TunerRunParams) -> dict[str, Any] | WithDescriptors:
        def notify(news: dict[str, Any]) -> None:
            call.connection.notify("Progress", {"msgid": call.msgid, **news})

        if params.command not in MEASURING:
            return await self._tuner_runs.run(params, call.descriptors, notify)
        with self._leasing.adding(call.connection.peer.pid, "a model is being tuned by hand"):
            return await self._tuner_runs.run(params, call.descriptors, notify)

    async def _tuner_stop(self, call: Call, params: TunerStopParams) -> dict[str, Any]:
        self._tuner_runs.stop(params.model)
        return {}

    async def _repository_index(self, call: Call, params: Nothing) -> dict[str, Any]:
        return {
            "models": [
                {"name": entry.name, "version": VERSION, "state": entry.state.value, "reason": entry.remark}
                for entry in self._registry.all()
            ]
        }

    async def _repository_load(self, call: Call, params: LoadParams) -> dict[str, Any]:
        def notify(progress: dict[str, Any]) -> None:
            call.connection.notify("Progress", {"msgid": call.msgid, **progress})

        with self._leasing.adding(call.connection.peer.pid):
            return await self._jobs.add(params, call.descriptors, notify)

    async def _repository_unload(self, call: Call, params: UnloadParams) -> dict[str, Any]:
        await self._jobs.remove(params.model_name)
        self._ledger.forget(params.model_name)
        self._leasing.forget(params.model_name)
        return {}

    _METHODS: dict[str, Callable[..., Coroutine[Any, Any, dict[str, Any] | WithDescriptors]]] = {
        "ServerLive": _server_live,
        "ServerReady": _server_ready,
        "ServerMetadata": _server_metadata,
        "ServerStatus": _server_status,
        "Metrics": _show_metrics,
        "ConfigShow": _config_show,
        "ConfigReload": _config_reload,
        "ModelReady": _model_ready,
        "ModelMetadata": _model_metadata,
        "ModelStatistics": _model_statistics,
        "ModelShow": _model_show,
        "ModelProfile": _model_profile,
        "ModelExport": _model_export,
        "ModelPublish": _model_publish,
        "ModelHistory": _model_history,
        "ModelRollback": _model_rollback,
        "ModelPin": _model_pin,
        "ModelInfer": _model_infer,
        "LeaseAsk": _lease_ask,
        "TunerReport": _tuner_report,
        "LeaseRelease": _lease_release,
        "TunerRun": _tuner_run,
        "TunerStop": _tuner_stop,
        "SystemSharedMemoryRegister": _region_register,
        "SystemSharedMemoryStatus": _region_status,
        "SystemSharedMemoryUnregister": _region_unregister,
        "RepositoryIndex": _repository_index,
        "RepositoryModelLoad": _repository_load,
        "RepositoryModelUnload": _repository_unload,
    }


def _named(params: ModelParams) -> str:
    check_version(params.version)
    if not params.name:
        raise NotFound("name is empty; say which model, 'hone list' shows which there are")
    return params.name
