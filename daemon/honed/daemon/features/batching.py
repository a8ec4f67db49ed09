"""Batches requests for a model: they run as one, and each gets its own answer.

Requests that agree in all but their first dimension may form a batch. It runs when it is full, when the first
request has waited for the model's delay, or when one would miss its deadline. While a batch runs, the next
one is gathered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from honed.daemon.aio import expire
from honed.daemon.core.model import ServedModel
from honed.daemon.feature import Feature, FeatureRequest, Infer
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.pool import EngineManager
from honed.daemon.store.names import Shapes
from honed.daemon.worker.calls import RunBatch
from honed.protocol.errors import DeadlineExceeded, HonedError, Internal, InvalidArgument, ResourceExhausted
from honed.protocol.results import ModelSettings
from honed.protocol.strict import Map

_MARGIN_RUNS = 2.0  # Time before a deadline at which a batch must begin, in runs
_FORGET = 0.8  # Weight of the known mean of run times against a new time
Plan = Callable[[FeatureRequest, ServedModel], InferencePlan]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMember:
    """A request that may be run with others."""

    number: int
    user: int
    rows: int  # Size of its first dimension
    arrived: float
    deadline: float


class BatchQueue:
    """A queue of requests of a kind; users take turns in filling a batch, each first in, first out.

    No I/O and no clock: times are seconds on one monotonic clock.
    """

    def __init__(self, most: int, delay: float) -> None:
        """Initialise; at most `most` rows run together, and none waits over `delay` while nothing runs."""
        self._most = most
        self._delay = delay
        self._waiting: list[BatchMember] = []
        self._turns: dict[int, int] = {}  # Number of each user's last turn
        self._turn = 0
        self._running = 0
        self._seconds = 0.0  # Moving mean of the time of a run

    @property
    def idle(self) -> bool:
        """Return whether no request waits and no batch runs."""
        return not self._waiting and not self._running

    def add(self, member: BatchMember) -> None:
        """Append a request to the queue."""
        self._waiting.append(member)

    def withdraw(self, number: int) -> None:
        """Remove a request that its client abandoned."""
        self._waiting = [member for member in self._waiting if member.number != number]

    def record_end(self, seconds: float) -> None:
        """Record that a batch returned by `due` has run for `seconds`."""
        self._running -= 1
        self._seconds = lately(self._seconds, seconds)

    def due(self, now: float) -> list[tuple[BatchMember, ...]]:
        """Return the batches to run now; the caller reports the end of each by `record_end`."""
        batches = []
        while self._waiting and now >= self._time():
            batches.append(self._take_batch())
            self._running += 1
        return batches

    def next_time(self) -> float | None:
        """Return when to call `due` again if nothing happens before; None: only after an event."""
        return self._time() if self._waiting and self._time() < float("inf") else None

    def _time(self) -> float:
        """Return when the next batch is due: minus infinity if it is full."""
        if sum(member.rows for member in self._waiting) >= self._most:
            return float("-inf")
        if self._running:
            return self._urgent()
        return min(self._urgent(), min(member.arrived for member in self._waiting) + self._delay)

    def _urgent(self) -> float:
        """Return when a batch must begin to meet the earliest deadline."""
        return min(member.deadline for member in self._waiting) - _MARGIN_RUNS * self._seconds

    def _take_batch(self) -> tuple[BatchMember, ...]:
        """Remove and return the next batch: users in turn, while rows fit; the first fits always."""
        chosen: list[BatchMember] = []
        rows = 0
        while self._waiting:
            member = min(self._waiting, key=lambda m: (self._turns.get(m.user, 0), m.arrived, m.number))
            if chosen and rows + member.rows > self._most:
                break
            self._waiting.remove(member)
            self._turn += 1
            self._turns[member.user] = self._turn
            chosen.append(member)
            rows += member.rows
        if not self._waiting:
            self._turns.clear()
        return tuple(chosen)


def lately(mean: float, seconds: float) -> float:
    """Return the exponential moving mean of times: `mean` (0: none yet) updated by `seconds`."""
    return _FORGET * mean + (1 - _FORGET) * seconds if mean else seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BatchRequest:
    """A request that may be run with others; `answered` holds its result or error."""

    member: BatchMember
    call: FeatureRequest
    plan: InferencePlan
    answered: asyncio.Future[Map]


@dataclass(slots=True, kw_only=True)
class _BatchGroup:
    """A group of requests that may run as one."""

    kind: Hashable
    gathering: BatchQueue
    waiting: dict[int, _BatchRequest] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


def _end_unless_awaited(
    run: asyncio.Task[None], members: Sequence[_BatchRequest], _: asyncio.Future[Map]
) -> None:
    """Cancel the run of a batch once the clients of all its members gave up."""
    if all(member.answered.done() for member in members):
        run.cancel()


class Batcher(Feature):
    """A feature that batches the requests of models whose settings allow it; `plan` checks a request."""

    def __init__(self, pool: EngineManager, ledger: UsageLog, leasing: Leasing, plan: Plan) -> None:
        self._pool = pool
        self._leasing = leasing
        self._plan = plan
        self._ledger = ledger
        self._groups: dict[Hashable, _BatchGroup] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count(1)

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Batch requests for a model if its settings allow that."""
        if entry.manifest.settings.max_batch < 2:
            return None

        async def infer_joined(call: FeatureRequest) -> Map:
            entry = call.entry
            if call.alone or not joinable(call.shapes, entry.manifest.settings):
                return await infer(call)
            with self._leasing.serving(entry.name, call.connection.peer.pid):
                runner = call.runner()
                plan = self._plan(call, runner)
                result = await self._infer(call, plan)
            for answered in call.answered:
                answered(runner, plan, ())
            return result

        return infer_joined

    async def _infer(self, call: FeatureRequest, plan: InferencePlan) -> Map:
        """Return the result of a request for which `joinable` is true; raise its error."""
        loop, now, timeout = asyncio.get_running_loop(), time.monotonic(), call.seconds(plan)
        member = BatchMember(
            number=next(self._numbers),
            user=call.connection.client.user,
            rows=rows_of(plan),
            arrived=now,
            deadline=now + timeout,
        )
        request = _BatchRequest(member=member, call=call, plan=plan, answered=loop.create_future())
        group = self._group_of(call.entry, plan)
        for region in plan.regions:
            region.hold()  # The client may release it while the request waits
        group.waiting[member.number] = request
        group.gathering.add(member)
        self._look(group)
        error = DeadlineExceeded("the request's deadline passed before it was answered; allow more time")
        late = loop.call_later(timeout, expire, request.answered, error)
        try:
            return await request.answered
        finally:
            late.cancel()
            if group.waiting.pop(member.number, None) is not None:
                group.gathering.withdraw(member.number)
                self._look(group)
            for region in plan.regions:
                self._pool.requests.release(region)

    def _group_of(self, entry: ServedModel, plan: InferencePlan) -> _BatchGroup:
        """Return the group of the requests that may run with this one."""
        settings = entry.manifest.settings
        kind = (
            entry.number,
            settings.max_batch,
            settings.batch_delay_us,
            plan.finite,
            plan.priority,
            tuple((tensor.name, tensor.dtype, (tensor.shape or ())[1:]) for tensor, _ in plan.inputs),
        )
        if kind not in self._groups:
            gathering = BatchQueue(settings.max_batch, settings.batch_delay_us / 1e6)
            self._groups[kind] = _BatchGroup(kind=kind, gathering=gathering)
        return self._groups[kind]

    def _look(self, group: _BatchGroup) -> None:
        """Run the batches that are due, and schedule the next call."""
        for batch in group.gathering.due(time.monotonic()):
            members = [group.waiting.pop(member.number) for member in batch]
            task = asyncio.ensure_future(self._run(group, members))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for member in members:
                member.answered.add_done_callback(partial(_end_unless_awaited, task, members))
        if group.timer is not None:
            group.timer.cancel()
            group.timer = None
        when = group.gathering.next_time()
        if when is not None:
            delay = max(0.0, when - time.monotonic())
            group.timer = asyncio.get_running_loop().call_later(delay, self._look, group)
        elif group.gathering.idle:
            self._groups.pop(group.kind, None)

    async def _run(self, group: _BatchGroup, members: Sequence[_BatchRequest]) -> None:
        begun = time.monotonic()
        found: Sequence[Map | HonedError]
        try:
            found = await self._answers(members)
        except HonedError as error:
            found = [type(error)(*error.args) for _ in members]
        except Exception as error:  # noqa: BLE001 - each client receives an internal error
            _log.exception("running %d requests as one failed", len(members))
            found = [Internal(f"the service failed in running requests as one ({error!r})")] * len(members)
        finally:
            group.gathering.record_end(time.monotonic() - begun)
            self._look(group)
        for member, result in zip(members, found, strict=True):
            if member.answered.done():
                continue  # The client gave up
            if isinstance(result, HonedError):
                member.answered.set_exception(result)
            else:
                member.answered.set_result(result)

    async def _answers(self, members: Sequence[_BatchRequest]) -> Sequence[Map | HonedError]:
        """Return the result or error of each request, in order; raise an error that concerns all."""
        if len(members) > 1:
            try:
                return await self._as_one(members)
            except (InvalidArgument, ResourceExhausted) as error:
                # A single request caused the error: run each alone, so that only its client sees it.
                name = members[0].call.entry.name
                _log.info("model %s: %d requests are run one by one: %s", name, len(members), error)
        return await asyncio.gather(*map(self._alone, members))

    async def _alone(self, request: _BatchRequest) -> Map | HonedError:
        call, plan, left = request.call, request.plan, request.member.deadline - time.monotonic()
        runner, client = call.runner(), call.connection.client
        try:
            result, ran = await self._pool.requests.infer(client, runner, plan, call.data, call.id, left)
        except HonedError as error:
            return error
        self._ledger.count_run(runner, ran.infer_ns, fits=not plan.needs_cpu_engine)
        return result

    async def _as_one(self, members: Sequence[_BatchRequest]) -> list[Map]:
        arrived = time.monotonic()
        plans = [member.plan for member in members]
        rows, first = sum(map(rows_of, plans)), members[0].call
        shapes = {tensor.name: (rows, *(tensor.shape or ())[1:]) for tensor, _ in plans[0].inputs}
        runner = first.runner(shapes)
        compiled = runner.compiled
        fits = compiled is not None and all(shapes[t.name] == t.shape for t in compiled.inputs)

        def call(key: str) -> RunBatch:
            return RunBatch(key=key, members=tuple(m.plan.call(m.call.data, key) for m in members))

        regions = {region.number: region for plan in plans for region in plan.regions}
        work = await self._pool.requests.ask_for(
            first.connection.client,
            runner,
            call,
            regions=tuple(regions.values()),
            priority=plans[0].priority,
            timeout=max(member.member.deadline for member in members) - arrived,
            open_shape=not fits,
            empty=plans[0].empty or None,
        )
        [batch] = work.answers
        runner.statistics.count_batch(len(plans))
        self._ledger.count_run(runner, batch.members[0].infer_ns, fits=fits)
        return [
            member.plan.answer(
                ran, member.call.id, self._pool.requests.record_run(runner, work, ran, member.member.arrived)
            )
            for member, ran in zip(members, batch.members, strict=True)
        ]


def joinable(shapes: Shapes, settings: ModelSettings) -> bool:
    """Return whether a request may be batched: all inputs have equally many rows, fewer than a batch."""
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    return len(rows) == 1 and 0 < min(rows) < settings.max_batch


def rows_of(plan: InferencePlan) -> int:
    """Return the number of rows of the request's inputs."""
    return (plan.inputs[0][0].shape or (0,))[0]
