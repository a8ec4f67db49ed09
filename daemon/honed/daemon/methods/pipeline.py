"""ModelInfer from request to answer: through the features that its model uses, and to a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from typing import Any

from honed.daemon.core.model import ServedModel
from honed.daemon.core.queue import Replaced, service_stops
from honed.daemon.core.state import Registry
from honed.daemon.core.statistics import Statistics
from honed.daemon.feature import Feature, Infer, InferCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving import plan as plans
from honed.daemon.serving.in_flight import PendingRequest
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.pool import Pool
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.names import is_variant
from honed.daemon.store.store import Manifest
from honed.daemon.transport.connection import Connection, Done
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import HonedError
from honed.protocol.methods import check_version
from honed.protocol.params import InferParams
from honed.protocol.results import Inferred, ObservedSizes


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """What answers requests for a version of a model, as long as its manifest and compiled form are these.

    One that is `plain` uses no feature.
    """

    entry: ServedModel
    manifest: Manifest
    compiled: Compiled | None
    infer: Infer
    plain: bool


@dataclass(kw_only=True)
class InferencePipeline:
    """Answers inferences, until the service is `stopping`. `features` are those from the outside in."""

    limits: Limits
    registry: Registry
    pool: Pool
    leasing: Leasing
    ledger: UsageLog
    features: Sequence[Feature] = ()
    stopping: bool = False
    _wrapped: dict[str, _Wrapped] = field(init=False, default_factory=dict)  # by model

    def check_running(self) -> None:
        """Raise Unavailable while the service stops."""
        if self.stopping:
            raise service_stops()

    def start(
        self, connection: Connection, params: InferParams
    ) -> Coroutine[Any, Any, Inferred] | PlainInference:
        """Return the work for ModelInfer."""
        entry = self.registry.find(params.model_name)
        if entry is None or is_variant(entry.name) or not self._of(entry).plain:
            return self.infer(connection, params)
        return PlainInference(self, InferCall(connection=connection, entry=entry, params=params))

    async def infer(self, connection: Connection, params: InferParams) -> Inferred:
        """Return the result of ModelInfer; raise its error."""
        begun = time.monotonic()
        with counted(self.registry.statistics(params.model_name)):
            check_version(params.model_version)
            entry = self.registry.model(params.model_name)
            return await self.answer(InferCall(connection=connection, entry=entry, params=params), begun)

    async def answer(self, call: InferCall, begun: float) -> Inferred:
        """Return the result of a request that came at `begun`.

        If the model is replaced while the request waits, the request is checked again for the model that took
        its place.
        """
        while True:
            try:
                return await self._of(call.entry).infer(call)
            except Replaced:
                call = self.replaced(call, begun)

    def replaced(self, call: InferCall, begun: float) -> InferCall:
        """Return the request for the model that replaced its own; raise NotFound if there is none."""
        deadline = begun + plans.timeout_us(call.params.parameters) / 1e6
        return replace(call, entry=self.registry.model(call.entry.name), deadline=deadline)

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
        plain = True
        for feature in reversed(self.features):
            wrapped = feature.wrap(entry, infer)
            if wrapped is not None:
                infer, plain = wrapped, False
        self._wrapped = {
            name: each for name, each in self._wrapped.items() if self.registry.serves(each.entry)
        }
        made = self._wrapped[entry.name] = _Wrapped(entry, entry.manifest, entry.compiled, infer, plain)
        return made

    def rewrap(self, model: str) -> None:
        """Ask the features again whether they wrap a model."""
        self._wrapped.pop(model, None)

    async def _run(self, call: InferCall) -> Inferred:
        self.check_running()  # it may have waited in a sequence
        connection, runner = call.connection, call.runner()
        with self.leasing.serving(call.entry.name, connection.peer.pid):
            plan = self.plan(call, runner)
            result, observed = await self.pool.asking.infer(connection.client, runner, plan)
        self.ran(call, runner, plan, result, observed)
        return result

    def ran(
        self,
        call: InferCall,
        runner: ServedModel,
        plan: InferencePlan,
        result: Inferred,
        observed: tuple[ObservedSizes, ...],
    ) -> None:
        """Note that a request was answered."""
        for answered in call.answered:
            answered(runner, plan, observed)
        unfit = plan.open and runner.compiled is not None  # for what could be tuned
        if self.registry.find(runner.name) is not None and not runner.away and not unfit:
            self.ledger.ran(runner.name, result.parameters.compute_us / 1e6)

    def plan(self, call: InferCall, runner: ServedModel) -> InferencePlan:
        """Check a request against what is to run it; raise InvalidArgument, NotFound, or Unavailable."""
        compiled, given = self.registry.interfaces(runner)
        plan = plans.check(
            call.params,
            compiled,
            given,
            call.connection.regions,
            max_bytes=self.limits.max_answer_bytes,
            keep=self.ledger.settings.keep_inputs,
        )
        if call.deadline is None:
            return plan
        return replace(plan, timeout=call.deadline - time.monotonic())


class PlainInference:
    """A request for a model that uses no feature, from one callback to the next.

    Without a task it takes two turns of the event loop, in the place of four.
    """

    __slots__ = ("_begun", "_call", "_counted", "_done", "_pipeline", "_plan", "_task", "_work")

    def __init__(self, pipeline: InferencePipeline, call: InferCall) -> None:
        self._pipeline = pipeline
        self._call = call
        self._done: Done | None = None
        self._task: asyncio.Task[Inferred] | None = None
        self._work: PendingRequest[Any] | None = None
        self._counted = False

    def begin(self, done: Done) -> None:
        """Ask for it to be run; `done` is called once with the result or an error, perhaps at once."""
        self._done, self._begun = done, time.monotonic()
        pipeline, call = self._pipeline, self._call
        entry = call.entry
        entry.statistics.arrived()
        try:
            check_version(call.params.model_version)
            pipeline.check_running()
            self._counted = pipeline.leasing.came(entry.name, call.connection.peer.pid)
            self._plan = plan = pipeline.plan(call, entry)
            self._work = work = PendingRequest(
                call=plan.for_worker,
                regions=plan.regions,
                open=plan.open,
                empty=plan.empty,
                on_end=self._on_end,
            )
            pipeline.pool.asking.begin(call.connection.client, entry, plan.priority, plan.timeout, work)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            self._work = None
            self._end(None, error)

    def cancel(self) -> None:
        """Cancel the request: nobody waits for it any more. Nothing happens if it has ended."""
        work, self._work = self._work, None
        if self._task is not None:
            self._task.cancel()
        elif work is not None:
            self._pipeline.pool.asking.end(work, failed=True)
            self._end(None, asyncio.CancelledError())

    def _on_end(self, work: PendingRequest[Any], error: HonedError | None) -> None:
        """Finish the request: a worker has answered, or it is known that none will."""
        pipeline, entry = self._pipeline, self._call.entry
        self._work = None
        pipeline.pool.asking.end(work, failed=error is not None)
        try:
            if isinstance(error, Replaced):
                self._again()
                return
            if error is not None:
                raise error
            result, observed = pipeline.pool.asking.inferred(entry, self._plan, work, self._begun)
            pipeline.ran(self._call, entry, self._plan, result, observed)
        except Exception as failure:  # noqa: BLE001 - whatever it is, it is the answer
            self._end(None, failure)
        else:
            self._end(result, None)

    def _again(self) -> None:
        """Have the model answer that took the place of its own, which may use features."""
        call = self._pipeline.replaced(self._call, self._begun)
        self._task = asyncio.ensure_future(self._pipeline.answer(call, self._begun))
        self._task.add_done_callback(self._answered_again)

    def _answered_again(self, task: asyncio.Task[Inferred]) -> None:
        self._task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._end(None if error is not None else task.result(), error)

    def _end(self, result: Inferred | None, error: BaseException | None) -> None:
        done, self._done = self._done, None
        if self._counted:
            self._pipeline.leasing.went(self._call.entry.name)
        if error is not None:
            ns = round((time.monotonic() - self._begun) * 1e9)
            self._call.entry.statistics.failed(_code(error), ns)
        assert done is not None
        done(result, error)


@contextmanager
def counted(statistics: Statistics) -> Iterator[None]:
    """Count one request around its work, and its failure if it raises."""
    statistics.arrived()
    begun = time.monotonic_ns()
    try:
        yield
    except BaseException as error:
        statistics.failed(_code(error), time.monotonic_ns() - begun)
        raise


def _code(error: BaseException) -> str:
    match error:
        case HonedError():
            return error.code
        case asyncio.CancelledError():
            return "CANCELLED"
        case _:
            return "INTERNAL"
