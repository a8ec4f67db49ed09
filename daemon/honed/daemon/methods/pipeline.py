"""Runs requests: prepares them, and passes them through the model's features to a worker."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from honed.daemon.aio import Driven
from honed.daemon.core.model import ServedModel
from honed.daemon.core.queue import ModelReplaced, service_stops
from honed.daemon.core.state import Registry
from honed.daemon.core.statistics import Statistics
from honed.daemon.feature import Feature, FeatureRequest, Infer, Known, MethodCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving import plan as plans
from honed.daemon.serving.plan import InferencePlan, check_compiled, wants_compiled, with_scalars
from honed.daemon.serving.pool import EngineManager
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import CompiledFileInfo
from honed.daemon.store.store import Manifest
from honed.daemon.transport.connection import Connection
from honed.protocol.errors import HonedError, NotPrepared
from honed.protocol.methods import check_version
from honed.protocol.params import InferParams, PrepareParams, RunParams
from honed.protocol.results import PrepareResult
from honed.protocol.strict import Map

MOST_PREPARED: Final = 256  # Requests of a connection


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """The wrapped handler of a model's requests, valid while manifest and compiled file are these."""

    entry: ServedModel
    manifest: Manifest
    compiled: CompiledFileInfo | None
    infer: Infer


class _PreparedRequest(NamedTuple):
    """A prepared request, shared by runs that differ in data and `id`, with values derived from it.

    `owner` is that of its model, None for administrators.
    """

    params: PrepareParams
    cache: Known
    owner: int | None


@dataclass(kw_only=True)
class InferencePipeline:
    """The pipeline of inferences, until the service is `stopping`; the first of `features` is outermost."""

    limits: Limits
    registry: Registry
    pool: EngineManager
    leasing: Leasing
    usage_log: UsageLog
    features: Sequence[Feature] = ()
    stopping: bool = False
    _wrapped: dict[str, _Wrapped] = field(init=False, default_factory=dict)  # Handlers by model
    # Prepared requests by connection and number. Numbers are unique, also across restarts, so that a number
    # used on another connection is an error.
    _prepared: dict[int, dict[int, _PreparedRequest]] = field(init=False, default_factory=dict)
    _numbers: itertools.count[int] = field(
        init=False, default_factory=lambda: itertools.count(secrets.randbits(62))
    )

    def check_running(self) -> None:
        """Raise Unavailable if the service is stopping."""
        if self.stopping:
            raise service_stops()

    async def prepare(self, connection: Connection, params: PrepareParams) -> PrepareResult:
        """Return the result of ModelPrepare; beyond MOST_PREPARED, the connection's oldest is evicted."""
        check_version(params.model_version)
        entry = self.registry.model(params.model_name)
        held = self._prepared.get(connection.number)
        if held is None:
            held = self._prepared[connection.number] = {}
            connection.when_closed(partial(self._prepared.pop, connection.number, None))
        if len(held) >= MOST_PREPARED:
            del held[next(iter(held))]
        number = next(self._numbers)
        held[number] = _PreparedRequest(params, {}, entry.manifest.owner)
        return PrepareResult(number=number)

    def run(self, call: MethodCall, params: RunParams) -> Driven[Map]:
        """Return the work for ModelRun; raise NotPrepared for an unknown number."""
        prepared = self._prepared.get(call.connection.number, {}).get(params.number)
        if prepared is not None:
            entry = self.registry.find(prepared.params.model_name)
            if entry is None or entry.manifest.owner == prepared.owner:
                return Driven(self._infer(call.connection, prepared.params, prepared.cache, params, entry))
        raise NotPrepared(f"no request is prepared as {params.number} on this connection; prepare it")

    def infer(self, call: MethodCall, params: InferParams) -> Driven[Map]:
        """Return the work for ModelInfer."""
        prepared = PrepareParams(
            model_name=params.model_name,
            model_version=params.model_version,
            parameters=params.parameters,
            inputs=params.inputs,
            outputs=params.outputs,
        )
        run = RunParams(number=0, id=params.id, raw_input_contents=params.raw_input_contents)
        return Driven(self._infer(call.connection, prepared, {}, run, None))

    async def _infer(
        self,
        connection: Connection,
        params: PrepareParams,
        cache: Known,
        run: RunParams,
        entry: ServedModel | None,
    ) -> Map:
        """Return the result of a request; `entry` None: its model is looked up, and its version checked.

        If the model is replaced while the request waits, the new one answers.
        """
        begun = time.monotonic()
        with counted(self.registry.statistics(params.model_name)):
            deadline = None
            if run.timeout is not None:
                deadline = begun + plans.check_timeout(run.timeout) / 1e6
            if entry is None:
                check_version(params.model_version)
                entry = self.registry.model(params.model_name)
            if wants_compiled(params):
                params = with_scalars(params, entry.manifest.interface)
            call = FeatureRequest(
                connection=connection,
                entry=entry,
                params=params,
                data=run.raw_input_contents or (),
                id=run.id or "",
                cache=cache,
                deadline=deadline,
            )
            while True:
                try:
                    return await self._of(call.entry).infer(call)
                except ModelReplaced:
                    deadline = deadline or begun + plans.timeout_us(params.parameters) / 1e6
                    entry = self.registry.model(entry.name)
                    call = dataclasses.replace(call, entry=entry, deadline=deadline)

    def _of(self, entry: ServedModel) -> _Wrapped:
        """Return the function that answers requests for a model, wrapped by the features that it uses."""
        known = self._wrapped.get(entry.name)
        if (
            known is not None
            and known.entry is entry
            and known.manifest is entry.manifest
            and known.compiled is entry.compiled
        ):
            return known
        infer: Infer = self._run
        for feature in reversed(self.features):
            infer = feature.wrap(entry, infer) or infer
        self._wrapped = {
            name: each for name, each in self._wrapped.items() if self.registry.serves(each.entry)
        }
        made = self._wrapped[entry.name] = _Wrapped(entry, entry.manifest, entry.compiled, infer)
        return made

    def rewrap(self, model: str) -> None:
        """Have the features wrap a model again at its next request."""
        self._wrapped.pop(model, None)

    async def _run(self, call: FeatureRequest) -> Map:
        self.check_running()  # The request may have waited in a sequence
        connection, runner = call.connection, call.runner()
        counted = self.leasing.request_started(call.entry.name, connection.peer.pid)
        try:
            plan = self.plan(call, runner)
            result, ran = await self.pool.requests.infer(
                connection.client, runner, plan, call.data, call.id, call.seconds(plan)
            )
        finally:
            if counted:
                self.leasing.request_finished(call.entry.name)
        for answered in call.answered:
            answered(runner, plan, ran.observed)
        if self.registry.find(runner.name) is not None:  # The model was not removed during the run
            self.usage_log.count_run(runner, ran.infer_ns, fits=not plan.needs_cpu_engine)
        return result

    def plan(self, call: FeatureRequest, runner: ServedModel) -> InferencePlan:
        """Check a request against the model that runs it; raise InvalidArgument, NotFound, or Unavailable.

        The plan is cached for requests that differ only in their data, which is always checked.
        """
        check_compiled(runner, call.params)
        compiled, given = self.registry.interfaces(runner)
        regions, most = call.connection.regions, self.limits.max_answer_bytes
        keep = self.usage_log.settings.keep_inputs

        def check() -> InferencePlan:
            return plans.check(call.params, compiled, given, regions, max_bytes=most, keep=keep)

        plan = call.compute_once(runner.name, (compiled, given, most, keep, regions.changes), check)
        plan.check_data(call.data)
        return plan


class counted:  # noqa: N801 - used in `with`, where a generator takes twice as long
    """A context that counts a request, and its failure if the body raises."""

    __slots__ = ("_begun", "_statistics")

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def __enter__(self) -> None:
        self._statistics.count_arrival()
        self._begun = time.monotonic_ns()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._statistics.count_failure(_code(error), time.monotonic_ns() - self._begun)


def _code(error: BaseException) -> str:
    match error:
        case HonedError():
            return error.code
        case asyncio.CancelledError():
            return "CANCELLED"
        case _:
            return "INTERNAL"
