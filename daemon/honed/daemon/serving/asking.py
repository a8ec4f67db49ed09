"""Requests that go to a worker by way of the machine, and what is noted of them when they are answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from honed.daemon.core import events
from honed.daemon.core.registry import Registry
from honed.daemon.core.requests import ClientId, Ticket
from honed.daemon.core.states import ServedModel, is_cpu
from honed.daemon.core.statistics import ServedInference
from honed.daemon.observe.latencies import Latencies
from honed.daemon.observe.profiles import merged
from honed.daemon.store.store import Store
from honed.daemon.worker.calls import ModelRan, ProfileModel, R, WorkerCall
from honed.daemon.worker.regions import HeldRegion
from honed.protocol.results import Inferred, ModelProfile
from honed.protocol.sizes import MetSizes

from .dispatch import Dispatcher, PendingRequest
from .inference import InferencePlan

PROFILE_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Asks workers for what clients want. `handle` tells the machine what has happened."""

    handle: Callable[[events.Event], None]
    dispatcher: Dispatcher
    models: Registry
    store: Store
    latencies: Latencies

    async def infer(
        self, client: ClientId, model: ServedModel, plan: InferencePlan
    ) -> tuple[Inferred, tuple[MetSizes, ...]]:
        """The result of ModelInfer, and the sizes that the model's parts met; raises what went wrong."""
        arrived = time.monotonic()
        work = PendingRequest(call=plan.for_worker, regions=plan.regions, open=plan.open)
        [answer] = await self._ask(client, model, plan.priority, plan.timeout, work)
        ran = work.model or model
        if work.engine == ran.device:  # another engine's times say nothing about the version
            self.latencies.note(ran.name, work.version, answer.infer_ns * 1e-9, time.time())
        if not plan.open and ran.manifest.times is not None:  # nothing else is compared with it
            ms = answer.infer_ns / 1e6
            self.handle(events.InferenceTimed(model=ran.number, engine=work.engine, ms=ms))
        return self.noted(model, plan, work, answer, arrived), answer.met

    async def ask_for(
        self,
        client: ClientId,
        model: ServedModel,
        call: Callable[[str], WorkerCall[R]],
        *,
        regions: Sequence[HeldRegion],
        priority: int,
        timeout: float,
        open_shape: bool,
    ) -> tuple[R, PendingRequest[R]]:
        """What a worker answers to a call for a model, as to a request, and how that came.

        `open_shape`: it has shapes that only the CPU engine takes.
        """
        held = {region.number: region for region in regions}
        work = PendingRequest(call=call, regions=list(held.values()), open=open_shape)
        [answer] = await self._ask(client, model, priority, timeout, work)
        return answer, work

    def noted(
        self,
        model: ServedModel,
        plan: InferencePlan,
        work: PendingRequest[Any],
        answer: ModelRan,
        arrived: float,
    ) -> Inferred:
        """The result, and its times where times are kept."""
        ran = work.model or model
        now, queued = time.monotonic(), work.started - arrived
        served = ServedInference(
            queued=queued,
            whole=now - arrived,
            input_ns=answer.input_ns,
            infer_ns=answer.infer_ns,
            output_ns=answer.output_ns,
            launches=ran.compiled.launches if ran.compiled and work.engine == ran.device else 0,
        )
        model.statistics.served(served, now, time.time_ns() // 1_000_000)
        kind = "cpu" if is_cpu(work.engine) else ran.compiled_kind
        model.statistics.answered_by(kind)
        return plan.result(answer, round(queued * 1e6), kind)

    async def profile(
        self, client: ClientId, model: ServedModel, runs: int, *, timeline: bool
    ) -> ModelProfile:
        """The result of ModelProfile; raises what went wrong. Other requests run between its runs."""

        def call(key: str) -> ProfileModel:
            served = self.models.get(model.name)  # it may be another version when its turn comes
            path = str(self.store.form(served.manifest, key))
            return ProfileModel(key=key, name=model.name, path=path, timeline=timeline)

        work = PendingRequest(call=call, regions=[], runs=runs)
        return merged(await self._ask(client, model, 2, PROFILE_SECONDS, work))

    async def _ask(
        self, client: ClientId, model: ServedModel, priority: int, timeout: float, work: PendingRequest[R]
    ) -> list[R]:
        """The answers of the worker."""
        now = time.monotonic()
        with self.dispatcher.taken(work, now + timeout) as number:
            ticket = Ticket(
                number=number,
                client=client,
                model=model.name,
                priority=priority,
                arrived=now,
                deadline=now + timeout,
                open=work.open,
            )
            try:
                self.handle(events.Asked(ticket))
                await work.done
            finally:
                self.handle(events.Left(number))
        return work.answers
