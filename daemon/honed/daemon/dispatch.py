"""Brings requests, models and one device's worker together: what `requests` decides is done here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from honed.runtime.errors import (
    DeadlineExceeded,
    DeviceError,
    HonedError,
    NotFound,
    Unavailable,
)

from .inference import Plan
from .latencies import Latencies
from .limits import Limits
from .loading import Loader
from .models import MAX_CRASHES, MAX_CRASHES_AN_HOUR, Entry, Registry, State
from .profiles import merged
from .regions import HeldRegion
from .requests import ATTEMPTS, Client, Queue, Ticket, full
from .statistics import Served
from .supervisor import Supervisor, WorkerLost

PROFILE_SECONDS = 600.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request's times, in monotonic seconds, and how often it ran already."""

    arrived: float
    deadline: float
    attempts: int = 0


class Moved(Unavailable):
    """Another device serves the model now; never shown to clients. The request ran `attempts` times."""

    def __init__(self, attempts: int) -> None:
        super().__init__("another device serves the model now")
        self.attempts = attempts


@dataclass(slots=True, kw_only=True)
class _Work:
    """What a ticket stands for."""

    method: str
    params: Callable[[str], dict[str, Any]]  # for the key the model has when it runs
    seconds: float  # the worker may take
    regions: list[HeldRegion]
    answer: asyncio.Future[list[dict[str, Any]]]
    runs: int = 1  # each a turn of its own
    answers: list[dict[str, Any]] = field(default_factory=list)
    started: float = 0.0
    version: int = 0  # of the model, that ran it


class Dispatcher:
    """Runs one request at a time on the worker of `lane`, and keeps its models those of the registry there.

    Whoever knows all devices sets the `on_...` attributes. A model answered once more; a worker ended running
    one; one cannot be served any more, and the answer tells whether something else was found; the worker is
    ready; it does not start; a region was let go of by its last holder.
    """

    def __init__(
        self,
        lane: str,
        limits: Limits,
        supervisor: Supervisor,
        registry: Registry,
        loader: Loader,
        latencies: Latencies,
    ) -> None:
        self.lane = lane
        self._limits = limits
        self._supervisor = supervisor
        self._registry = registry
        self._loader = loader
        self._latencies = latencies
        self._queue = Queue(limits.max_queue)
        self._work: dict[int, _Work] = {}
        self._numbers = itertools.count(1)
        self._running: asyncio.Task[None] | None = None
        self._ended = float("-inf")  # when a request ended last, in monotonic seconds
        self._suspect: Entry | None = None  # what ran when the worker was lost
        self.on_served: Callable[[Entry], None] = lambda _: None
        self.on_fault: Callable[[Entry, str], None] = lambda _, __: None
        self.on_broken: Callable[[Entry, str], bool] = lambda _, __: False
        self.on_ready: Callable[[], Awaitable[None]] | None = None
        self.on_failed: Callable[[], None] = lambda: None
        self.on_released: Callable[[int], None] = self.drop_region
        loader.wanted = lambda: self._queue.models()
        loader.idle_seconds = self._idle_seconds
        loader.on_loaded = self._pump
        loader.on_given_up = self._give_up
        supervisor.on_ready = self._worker_ready
        supervisor.on_lost = self._worker_lost

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def queue(self) -> Queue:
        """Those that wait, to be looked at."""
        return self._queue

    def _idle_seconds(self) -> float:
        busy = self._running is not None or self.waiting
        return 0.0 if busy else time.monotonic() - self._ended

    def limits_changed(self) -> None:
        """The limits are others from now on; what waits already keeps waiting."""
        self._queue.limit = self._limits.max_queue

    @property
    def running(self) -> int:
        """Requests that run: 0 or 1."""
        return int(self._running is not None)

    async def infer(self, client: Client, entry: Entry, plan: Plan, asked: Asked) -> dict[str, Any]:
        """The result of ModelInfer; raises what went wrong, Moved where another device must be asked."""
        work = self._new_work("Infer", plan.for_worker, self._limits.run_seconds, plan.regions)
        [answer] = await self._wait(client, entry, plan.priority, asked, work)
        queued = work.started - asked.arrived
        self._count(entry, answer, queued, time.monotonic() - asked.arrived)
        if entry.at_home:  # another device's times say nothing about the version
            self._latencies.note(entry.name, work.version, answer["infer_ns"] * 1e-9, time.time())
        return plan.result(answer["raw"], round(queued * 1e6), round(answer["infer_ns"] / 1000))

    async def profile(
        self, client: Client, entry: Entry, runs: int, asked: Asked, *, timeline: bool
    ) -> dict[str, Any]:
        """The result of ModelProfile; raises as `infer`. Other requests run between its runs."""

        def params(key: str) -> dict[str, Any]:
            return {"key": key, "timeline": timeline}

        work = self._new_work("Profile", params, self._limits.run_seconds, [])
        work.runs = runs
        answers = await self._wait(client, entry, 2, asked, work)
        return {"name": entry.name, **merged(answers)}

    def drop_model(self, name: str, error: HonedError) -> None:
        """Answer everything that waits for a model with `error`."""
        for ticket in self._queue.drop_model(name):
            self._fail(ticket, error)

    def hand_over(self, name: str) -> None:
        """Another device serves the model now: have everything that waits for it wait there."""
        for ticket in self._queue.drop_model(name):
            self._fail(ticket, Moved(ticket.attempts))

    def release(self, region: HeldRegion) -> None:
        """Let go of a region; with its last holder gone the workers unmap it."""
        if region.release():
            self.on_released(region.number)

    def drop_region(self, number: int) -> None:
        """Nobody holds a region any more: have the worker unmap it."""
        if self._supervisor.forget(number):
            self._loader.tell("Drop", {"region": number})

    def forget_client(self, client: Client) -> None:
        """A connection is gone; its requests are cancelled."""
        self._queue.forget_client(client)

    async def quiet(self) -> None:
        """Return once nothing runs."""
        while self._running is not None:
            await asyncio.wait([self._running])

    async def drain(self, seconds: float) -> None:
        """Let what is queued finish for so long, then answer the rest with Unavailable."""
        end = time.monotonic() + seconds
        while self._work and time.monotonic() < end:
            answers = [work.answer for work in self._work.values()]
            await asyncio.wait(answers, timeout=end - time.monotonic())
            await asyncio.sleep(0)  # let those who waited for the answers take them
        self._queue.drop_all()
        for work in self._work.values():
            _give(work.answer, Unavailable("the service is stopping; call again when it runs"))
        while self._work:
            await asyncio.sleep(0)  # until those who waited have taken the answers

    def _new_work(
        self,
        method: str,
        params: Callable[[str], dict[str, Any]],
        seconds: float,
        regions: list[HeldRegion],
    ) -> _Work:
        answer: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        return _Work(method=method, params=params, seconds=seconds, regions=regions, answer=answer)

    async def _wait(
        self, client: Client, entry: Entry, priority: int, asked: Asked, work: _Work
    ) -> list[dict[str, Any]]:
        self._check_servable(entry)
        number = next(self._numbers)
        ticket = Ticket(
            number=number,
            client=client,
            model=entry.name,
            priority=priority,
            arrived=asked.arrived,
            deadline=asked.deadline,
            attempts=asked.attempts,
        )
        victim = self._queue.submit(ticket)
        if victim is not None:
            self._fail(victim, full(self._limits.max_queue))
        self._work[number] = work
        for region in work.regions:
            region.hold()
        self._pump()
        try:
            async with asyncio.timeout(asked.deadline - time.monotonic()):
                return await work.answer
        except TimeoutError as error:
            where = "while it ran" if work.started else "before its turn came"
            raise DeadlineExceeded(f"the request's deadline passed {where}; allow more time") from error
        finally:
            self._queue.cancel(number)
            del self._work[number]
            for region in work.regions:
                self.release(region)

    def _check_servable(self, entry: Entry) -> None:
        if entry.state is State.UNAVAILABLE:
            raise Unavailable(f"model {entry.name!r} cannot be used: {entry.reason}")
        if self._supervisor.state == "failed":
            raise Unavailable(
                f"the worker does not start ({self._supervisor.reason}); 'hone doctor' may know why"
            )

    def _pump(self) -> None:
        """Start the next request if nothing runs."""
        if self._running is not None or self._supervisor.state != "ready":
            return
        ticket = self._queue.take(time.monotonic(), self._servable)
        if ticket is not None:
            self._running = asyncio.ensure_future(self._run(ticket, self._work[ticket.number]))

    def _find(self, name: str) -> Entry | None:
        """The model of that name, where this device serves it."""
        entry = self._registry.find(name)
        return entry if entry is not None and entry.lane == self.lane else None

    def _servable(self, name: str) -> bool:
        entry = self._find(name)
        return entry is not None and entry.state is State.READY

    async def _run(self, ticket: Ticket, work: _Work) -> None:
        for region in work.regions:
            region.hold()
        try:
            answer = await self._on_worker(ticket.model, work)
        except (WorkerLost, DeviceError) as error:
            self._worker_failed(ticket, work, error)
        except HonedError as error:
            _give(work.answer, error)
        else:
            self._worker_answered(ticket, work, answer)
        finally:
            self._running = None
            self._ended = time.monotonic()
            for region in work.regions:
                self.release(region)
            self._pump()

    def _worker_answered(self, ticket: Ticket, work: _Work, answer: dict[str, Any]) -> None:
        entry = self._find(ticket.model)
        if entry is not None:
            entry.crashes = 0
        work.answers.append(answer)
        if work.answer.done():
            return  # nobody waits for it any more
        if len(work.answers) < work.runs:
            self._queue.go_on(ticket)
            return
        if entry is not None:
            self.on_served(entry)
        work.answer.set_result(work.answers)

    async def _on_worker(self, model: str, work: _Work) -> dict[str, Any]:
        entry = self._registry.get(model)
        key, work.version = entry.key, entry.manifest.history.current.number
        work.started = time.monotonic()
        for region in work.regions:
            await self._supervisor.map(region, work.seconds)
        return await self._supervisor.call(work.method, work.params(key), seconds=work.seconds)

    def _worker_failed(self, ticket: Ticket, work: _Work, error: HonedError) -> None:
        """Run the request once more in a new worker, or give up."""
        _log.error("model %s: attempt %d failed: %s", ticket.model, ticket.attempts, error)
        if isinstance(error, DeviceError):
            self._supervisor.kill(f"the device failed: {error}")  # its context may be spoilt
        entry = self._find(ticket.model)
        if entry is not None:
            self._suspect = entry
            entry.crashes += 1
            if entry.crashes >= MAX_CRASHES:
                self._give_up(entry, f"{entry.crashes} workers in a row failed running it; last: {error}")
        entry = self._find(ticket.model)
        usable = entry is not None and entry.state is not State.UNAVAILABLE
        if work.answer.done():
            return
        if entry is not None and usable and self._queue.retry(ticket):
            entry.statistics.retried()
            return
        elsewhere = self._registry.find(ticket.model)
        if entry is None and elsewhere is not None and ticket.attempts < ATTEMPTS:
            elsewhere.statistics.retried()
            _give(work.answer, Moved(ticket.attempts))
            return
        _give(work.answer, Unavailable(f"the request failed in {ticket.attempts} workers; last: {error}"))

    def _give_up(self, entry: Entry, reason: str) -> None:
        if self.on_broken(entry, reason):
            return
        reason = f"{entry.away}, and there {reason}" if entry.away else reason
        _log.error("model %s is not served any more: %s", entry.name, reason)
        entry.fail(reason)
        self.drop_model(entry.name, Unavailable(f"model {entry.name!r} cannot be used: {reason}"))

    async def _worker_ready(self) -> None:
        await self._loader.load_all()
        if self.on_ready is not None:
            await self.on_ready()

    def _worker_lost(self) -> None:
        """The worker ended: its models are gone with it."""
        for entry in self._registry.of(self.lane):
            if entry.state is State.READY:
                entry.state = State.LOADING
        suspect, self._suspect = self._suspect, None
        if suspect is not None and not self._supervisor.ended_from_outside:
            self.on_fault(suspect, self._supervisor.reason)
            self._count_crash(suspect)
        if self._supervisor.state == "failed":
            self.on_failed()
            for ticket in self._queue.drop_all():
                self._fail(ticket, Unavailable(f"the worker does not start ({self._supervisor.reason})"))

    def _count_crash(self, entry: Entry) -> None:
        """A model that ends workers now and then goes, before it costs the others more."""
        times = entry.crashed(time.monotonic())
        if (
            times > MAX_CRASHES_AN_HOUR
            and self._find(entry.name) is entry
            and entry.state is not State.UNAVAILABLE
        ):
            self._give_up(
                entry, f"{times} workers ended running it within an hour; last: {self._supervisor.reason}"
            )

    def _fail(self, ticket: Ticket, error: HonedError) -> None:
        _give(self._work[ticket.number].answer, error)

    def _count(self, entry: Entry, answer: dict[str, Any], queued: float, whole: float) -> None:
        served = Served(
            queued=queued,
            whole=whole,
            input_ns=answer["input_ns"],
            infer_ns=answer["infer_ns"],
            output_ns=answer["output_ns"],
            launches=entry.compiled.launches if entry.compiled else 0,
        )
        entry.statistics.served(served, time.monotonic(), time.time_ns() // 1_000_000)


def removed(name: str) -> NotFound:
    """The error for requests whose model was removed while they waited."""
    return NotFound(f"model {name!r} was removed; 'hone list' shows which there are")


def _give(answer: asyncio.Future[list[dict[str, Any]]], error: HonedError) -> None:
    if not answer.done():
        answer.set_exception(error)
