"""Tracks requests that are not answered yet: starts their runs on workers, and records their times."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic

from honed.daemon.aio import DeadlineWatch, Ending
from honed.daemon.core import messages
from honed.daemon.core.messages import EndRun, Run
from honed.daemon.core.model import ServedModel, is_cpu
from honed.daemon.core.queue import ClientId, EmptyAxes, Ticket
from honed.daemon.core.state import Registry
from honed.daemon.core.statistics import ServedInference
from honed.daemon.observe.latencies import Latencies
from honed.daemon.settings.schema import Limits
from honed.daemon.store.store import Store
from honed.daemon.worker.calls import InferenceResult, ProfileModel, WorkerCall
from honed.daemon.worker.shared_memory import HeldRegion
from honed.daemon.worker.supervisor import NoWorker, WorkerDied
from honed.process.rpc import R
from honed.protocol import strict
from honed.protocol.errors import Cancelled, DeadlineExceeded, DeviceError, HonedError, OutOfMemory
from honed.protocol.peer import ResponseReceived
from honed.protocol.strict import Map
from honed.protocol.values import Data, ModelProfile, ProfiledRow
from honed.runtime.engines import LOWEST

from .engine_server import EngineServer
from .plan import InferencePlan, ResponseInfo

PROFILE_SECONDS = 600.0
_LONG_SECONDS = 1.0  # Time after which a CPU engine begins other runs beside one
_LOOK_SECONDS = 0.005  # Interval of checks whether all requests are answered, at shutdown
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PendingRequest(Generic[R]):
    """A request's call of a worker, and its answers so far.

    `call` takes the model's key at the time of the run. Each of the `runs` waits in the queue by itself.
    """

    number: int
    call: Callable[[str], WorkerCall[R]]
    regions: Sequence[HeldRegion]
    runs: int
    done: Ending  # Ends when all answers have arrived, or with an error
    needs_cpu_engine: bool  # Compiled files do not accept its shapes or values
    answers: list[R] = field(default_factory=list)
    started: float = 0.0
    model: ServedModel | None = None  # Model of the last run
    version: int = 0  # Version of that model
    engine: str = ""  # Engine of the last run


class InFlightRequests:
    """The requests that are not answered yet, by number, with their runs on workers."""

    def __init__(
        self,
        handle: Callable[[messages.Event], None],
        on_end: Callable[[messages.Event], None],
        limits: Limits,
        servers: Mapping[str, EngineServer],
        models: Registry,
        store: Store,
        latencies: Latencies,
    ) -> None:
        """Initialise; `handle` receives events, and `on_end` those that end a run."""
        self._handle = handle
        self._on_run = on_end
        self._limits = limits
        self._servers = servers
        self._models = models
        self._store = store
        self._latencies = latencies
        self._work: dict[int, PendingRequest[Any]] = {}
        self._deadlines = DeadlineWatch(self._late)
        self._calls: dict[int, tuple[str, int]] = {}  # Running calls: engine and call, by request
        self._long = DeadlineWatch(self._lasts)
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()

    async def infer(
        self,
        client: ClientId,
        model: ServedModel,
        plan: InferencePlan,
        data: Sequence[Data],
        name: str,
        timeout: float,
    ) -> tuple[Map, InferenceResult]:
        """Run an inference on data, with the `id` `name`.

        Returns the result of ModelInfer, as a map to send, and the worker's result. Raises the run's error.
        """
        arrived = time.monotonic()
        work = await self.ask_for(
            client,
            model,
            partial(plan.call, data),
            regions=plan.regions,
            priority=plan.priority,
            timeout=timeout,
            open_shape=plan.needs_cpu_engine,
            empty=plan.empty,
        )
        [answer] = work.answers
        ran = work.model or model
        if work.engine == ran.device:  # Another engine's times say nothing about the version
            self._latencies.note(ran.name, work.version, answer.infer_ns * 1e-9, time.time())
        # Other shapes would not be comparable with the times of the choice.
        if not work.needs_cpu_engine and ran.manifest.decision.times is not None:
            ms = answer.infer_ns / 1e6
            self._handle(messages.InferenceTimed(model=ran.number, engine=work.engine, ms=ms))
        return plan.answer(answer, name, self.record_run(model, work, answer, arrived)), answer

    async def ask_for(
        self,
        client: ClientId,
        model: ServedModel,
        call: Callable[[str], WorkerCall[R]],
        *,
        regions: Sequence[HeldRegion] = (),
        priority: int,
        timeout: float,
        open_shape: bool = False,
        empty: EmptyAxes = None,
        held: bool = False,
        runs: int = 1,
    ) -> PendingRequest[R]:
        """Queue a call for a model as a request, and return the ended request with the worker's answers.

        `open_shape`: only the CPU engine accepts its shapes; `empty`: its inputs with sizes of 0, and their
        axes; `held`: it needs state that lies in the worker, or leaves some there. Raises DeadlineExceeded
        after `timeout` seconds, and as `core.requests.request_arrived`.
        """
        now, number = time.monotonic(), next(self._numbers)
        ticket = Ticket(
            number=number,
            client=client,
            model=model.name,
            priority=priority,
            arrived=now,
            deadline=now + timeout,
            needs_cpu_engine=open_shape,
            empty=empty,
            held=held,
        )
        work = self._work[number] = PendingRequest(
            number=number,
            call=call,
            regions=regions,
            runs=runs,
            done=Ending(self._loop),
            needs_cpu_engine=open_shape,
        )
        self._deadlines.set(number, ticket.deadline)
        for region in regions:
            region.hold()
        try:
            self._handle(messages.RequestArrived(ticket))
            await work.done
        except BaseException:
            self._forget(work)
            self._handle(messages.ClientGaveUp(number))
            raise
        self._forget(work)
        return work

    def _forget(self, work: PendingRequest[Any]) -> None:
        del self._work[work.number]
        self._deadlines.drop(work.number)
        self._release(work)

    def record_run(
        self,
        model: ServedModel,
        work: PendingRequest[Any],
        answer: InferenceResult,
        arrived: float,
    ) -> ResponseInfo:
        """Record the times of a run in the statistics, and return what the response reports of it."""
        ran = work.model or model
        now, queued, kind = time.monotonic(), work.started - arrived, ran.kind_on(work.engine)
        served = ServedInference(
            engine=kind,
            queued=queued,
            total=now - arrived,
            input_ns=answer.input_ns,
            infer_ns=answer.infer_ns,
            output_ns=answer.output_ns,
            launches=ran.compiled.launches if ran.compiled and work.engine == ran.device else 0,
        )
        model.statistics.count_served(served, now, time.time_ns() // 1_000_000)
        if answer.lowered:
            self._lower(ran, answer.lowered)
        device = self._servers[work.engine].engine.label
        return ResponseInfo(round(queued * 1e6), round(answer.infer_ns / 1000), kind, device)

    def _lower(self, model: ServedModel, said: str) -> None:
        """Have the CPU engine run a model without optimisation, because its optimised session failed."""
        key = model.manifest.source_key
        if (known := self._models.optimisation(key)) is None or known.level == LOWEST:
            return
        why = f"ONNX Runtime does not run it so: {said}"
        _log.warning("model %s: the CPU engine runs it without optimisation: %s", model.name, why)
        found = replace(known, level=LOWEST, why=why, error=None, session=None)
        self._handle(messages.OptimisationChecked(key, found))

    async def profile(
        self, client: ClientId, model: ServedModel, runs: int, *, timeline: bool
    ) -> ModelProfile:
        """Return the result of ModelProfile; raise its error. Other requests run between its runs."""

        def call(key: str) -> ProfileModel:
            served = self._models.get(model.name)  # The model may have another version by the time of the run
            path = str(self._store.form(served.manifest, key))
            path = self._store.run_as(path, self._models.session_config(key).half)
            return ProfileModel(key=key, name=model.name, path=path, timeline=timeline)

        work = await self.ask_for(client, model, call, priority=2, timeout=PROFILE_SECONDS, runs=runs)
        return merge_profiles(work.answers)

    def _late(self, number: int) -> None:
        where = "while it ran" if self._work[number].started else "before its turn came"
        self.finish(number, DeadlineExceeded(f"the request's deadline passed {where}; allow more time"))

    def run(self, action: Run) -> Coroutine[Any, Any, None] | None:
        """Start a run on a worker; return a coroutine that starts it if regions must be mapped first.

        The run holds its regions even if the client gives up.
        """
        work, supervisor = self._work.get(action.ticket.number), self._servers[action.engine].supervisor
        if work is None:  # The client gave up just before the run
            self._on_run(_cancellation(action))
            return None
        for region in work.regions:
            region.hold()
        if all(map(supervisor.knows, work.regions)):
            self._begin(action, work)
            return None
        return self._map_regions(action, work)

    async def _map_regions(self, action: Run, work: PendingRequest[Any]) -> None:
        try:
            for region in work.regions:
                supervisor = self._servers[action.engine].supervisor
                await supervisor.map(region, self._limits.run_seconds)
        except NoWorker:
            self._release(work)  # WorkerLost enqueues the request again
        except HonedError as error:
            self._release(work)
            self._on_run(_failure(action.engine, work.number, error))
        else:
            self._begin(action, work)

    def _begin(self, action: Run, work: PendingRequest[Any]) -> None:
        if work.number not in self._work:  # The client gave up while regions were mapped
            self._release(work)
            self._on_run(_cancellation(action))
            return
        work.started = time.monotonic()
        work.model, work.version = action.model, action.model.manifest.history.number
        work.engine = action.engine
        work.needs_cpu_engine = action.ticket.needs_cpu_engine
        call = work.call(action.model.key_on(action.engine))
        supervisor = self._servers[action.engine].supervisor
        on_end = partial(self._end_run, action.engine, work, call)
        self._calls[work.number] = action.engine, 0
        if is_cpu(action.engine):
            self._long.set(work.number, work.started + _LONG_SECONDS)
        try:
            number = supervisor.ask(call, on_end, seconds=self._limits.run_seconds)
            if work.number in self._calls:  # The call may have ended at once
                self._calls[work.number] = action.engine, number
        except NoWorker:
            self._over(work)
            # WorkerLost, sent before or after this, enqueues the request again.
            self._release(work)
            work.started = 0.0
        except HonedError as error:
            self._over(work)
            self._release(work)
            self._on_run(_failure(action.engine, work.number, error))

    def _over(self, work: PendingRequest[Any]) -> None:
        """Forget the call of a run that has ended."""
        self._calls.pop(work.number, None)
        self._long.drop(work.number)

    def _lasts(self, number: int) -> None:
        engine, _ = self._calls[number]
        self._on_run(messages.RunLasts(engine, number))

    def end_run(self, action: EndRun) -> None:
        """Have the worker end a run that its client abandoned."""
        engine, call = self._calls.get(action.request, ("", 0))
        if engine == action.engine:
            self._servers[engine].supervisor.end_call(call)

    def _end_run(
        self,
        engine: str,
        work: PendingRequest[Any],
        call: WorkerCall[Any],
        answer: ResponseReceived | Exception,
    ) -> None:
        self._over(work)
        self._release(work)
        try:
            if isinstance(answer, Exception):
                raise answer
            work.answers.append(call.decode(answer))
        except NoWorker:
            work.started = 0.0  # WorkerLost enqueues the request again
        except HonedError as error:
            self._on_run(_failure(engine, work.number, error))
        except strict.SchemaError as error:
            reason = f"the worker's answer makes no sense: {error}"
            self._on_run(messages.WorkerFailed(engine, work.number, reason, device=False))
            self._servers[engine].supervisor.kill(reason)
        else:
            self._on_run(messages.RunSucceeded(engine, work.number, more=len(work.answers) < work.runs))

    def finish(self, request: int, error: HonedError | None = None) -> None:
        """End a request: all its answers have arrived, or it failed with an error."""
        if (work := self._work.get(request)) is not None:
            work.done.end(error)

    def release(self, region: HeldRegion) -> None:
        """Release a region; when the last holder has released it, the workers unmap it."""
        if region.release():
            for server in self._servers.values():
                server.drop_region(region.number)

    async def wait_until_answered(self, seconds: float) -> None:
        """Wait until all requests are answered, at most `seconds`."""
        end = time.monotonic() + seconds
        while self._work and time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)

    async def wait_until_delivered(self) -> None:
        """Wait until the callers of all requests have received their answers."""
        while self._work:
            await asyncio.sleep(0)

    def _release(self, work: PendingRequest[Any]) -> None:
        for region in work.regions:
            self.release(region)


def _cancellation(action: Run) -> messages.Event:
    error = Cancelled("the request was cancelled")
    return messages.RequestRejected(action.engine, action.ticket.number, error)


def _failure(engine: str, request: int, error: HonedError) -> messages.Event:
    short = isinstance(error, OutOfMemory) and is_cpu(engine)  # A failed allocation leaves the process intact
    if isinstance(error, WorkerDied | DeviceError) and not short:
        return messages.WorkerFailed(engine, request, str(error), device=isinstance(error, DeviceError))
    # The error's traceback would keep the frame it was caught in alive, with the data.
    return messages.RequestRejected(engine, request, error.with_traceback(None))


def merge_profiles(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Merge profiles: times are means, rates are those of the mean times, the rest is the first profile's."""
    count = len(profiles)
    sum_us = sum(each.sum_us for each in profiles) / count
    times: defaultdict[str, float] = defaultdict(float)
    for each in profiles:
        for row in each.rows:
            times[row.name] += row.us / count
    rows = [_with_time(row, times[row.name], sum_us) for row in profiles[0].rows]
    return replace(
        profiles[0],
        runs=count,
        sum_us=sum_us,
        whole_us=sum(each.whole_us for each in profiles) / count,
        rows=tuple(sorted(rows, key=lambda row: -row.us)),
    )


def _with_time(row: ProfiledRow, us: float, sum_us: float) -> ProfiledRow:
    faster = row.us / us if us else 0.0
    gflops, gbs, peak_share = (
        None if rate is None else rate * faster for rate in (row.gflops, row.gbs, row.peak_share)
    )
    return replace(
        row, us=us, share=us / sum_us if sum_us else 0.0, gflops=gflops, gbs=gbs, peak_share=peak_share
    )
