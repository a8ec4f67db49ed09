"""ModelInfer from request to answer: through the features that its model uses, and to a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from honed.daemon.core.model import ServedModel
from honed.daemon.core.queue import Replaced, service_stops
from honed.daemon.core.state import Registry
from honed.daemon.core.statistics import Statistics
from honed.daemon.feature import Feature, Infer, InferCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving import plan as plans
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.pool import Pool
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.store import Manifest
from honed.daemon.transport.connection import Connection
from honed.protocol.errors import HonedError
from honed.protocol.methods import check_version
from honed.protocol.params import InferParams
from honed.protocol.results import Inferred


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """What answers requests for a version of a model, as long as its manifest and compiled form are these."""

    entry: ServedModel
    manifest: Manifest
    compiled: Compiled | None
    infer: Infer


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

    async def infer(self, connection: Connection, params: InferParams) -> Inferred:
        """The result of ModelInfer; raises what went wrong.

        Where the model was replaced while the request waited, it is checked anew for the one that took its
        place.
        """
        begun = time.monotonic()
        with counted(self.registry.statistics(params.model_name)):
            check_version(params.model_version)
            entry = self.registry.model(params.model_name)
            call = InferCall(connection=connection, entry=entry, params=params)
            while True:
                try:
                    return await self._infer_of(entry)(call)
                except Replaced:
                    entry = self.registry.model(entry.name)
                    deadline = begun + plans.timeout_us(params.parameters) / 1e6
                    call = replace(call, entry=entry, deadline=deadline)

    def _infer_of(self, entry: ServedModel) -> Infer:
        """What answers requests for a model, wrapped by the features that it uses."""
        known = self._wrapped.get(entry.name)
        if (
            known is not None
            and known.entry is entry
            and known.manifest is entry.manifest
            and known.compiled is entry.compiled
        ):
            return known.infer
        infer: Infer = self._run
        for feature in reversed(self.features):
            infer = feature.wrap(entry, infer) or infer
        self._wrapped = {
            name: each for name, each in self._wrapped.items() if self.registry.serves(each.entry)
        }
        self._wrapped[entry.name] = _Wrapped(entry, entry.manifest, entry.compiled, infer)
        return infer

    def rewrap(self, model: str) -> None:
        """Ask the features of a model anew whether they wrap it."""
        self._wrapped.pop(model, None)

    async def _run(self, call: InferCall) -> Inferred:
        self.check_running()  # it may have waited in a sequence
        connection, runner = call.connection, call.runner()
        with self.leasing.serving(call.entry.name, connection.peer.pid):
            plan = self.plan(call, runner)
            result, met = await self.pool.asking.infer(connection.client, runner, plan)
        for answered in call.answered:
            answered(runner, plan, met)
        unfit = plan.open and runner.compiled is not None  # for what could be tuned
        if self.registry.find(runner.name) is not None and not runner.away and not unfit:
            self.ledger.ran(runner.name, result.parameters.compute_us / 1e6)
        return result

    def plan(self, call: InferCall, runner: ServedModel) -> InferencePlan:
        """The request, checked for what is to run it; raises InvalidArgument, NotFound, or Unavailable."""
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


@contextmanager
def counted(statistics: Statistics) -> Iterator[None]:
    """Around the work for one request: counts it, and its failure if it raises."""
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
