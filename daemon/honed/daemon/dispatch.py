"""Brings requests, models and the worker together: what `requests` decides is done here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from honed.runtime.errors import (
    DeadlineExceeded,
    DeviceError,
    HonedError,
    ModelRefused,
    NotFound,
    Unavailable,
)

from .inference import Plan
from .latencies import Latencies
from .limits import Limits
from .models import MAX_CRASHES, Entry, Registry, State, launches
from .regions import HeldRegion
from .requests import Queue, Ticket
from .statistics import Served
from .store import Store
from .supervisor import Supervisor, WorkerLost
from .versions import Duel

_PROFILE_SECONDS = 600.0
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Work:
    """What a ticket stands for."""

    method: str
    params: Callable[[str], dict[str, Any]]  # for the key the model has when it runs
    seconds: float  # the worker may take
    regions: list[HeldRegion]
    answer: asyncio.Future[dict[str, Any]]
    started: float = 0.0
    version: int = 0  # of the model, that ran it


@dataclass(frozen=True, slots=True)
class Loaded:
    """A compiled file is in worker number `worker`, which compared it with its probes."""

    worker: int
    checked: dict[str, Any]


class Dispatcher:
    """Runs one request at a time on the worker and keeps the worker's models those of the registry."""

    def __init__(
        self, limits: Limits, supervisor: Supervisor, registry: Registry, store: Store, latencies: Latencies
    ) -> None:
        self._limits = limits
        self._supervisor = supervisor
        self._registry = registry
        self._store = store
        self._latencies = latencies
        self._queue = Queue(limits.max_queue)
        self._work: dict[int, _Work] = {}
        self._numbers = itertools.count(1)
        self._kept: Counter[str] = Counter()  # by key, models being added
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._suspect: Entry | None = None  # what ran when the worker was lost
        # Of whoever knows versions. A model answered once more; a worker ended running one; one cannot be
        # served any more, and the answer tells whether an earlier version took its place.
        self.on_served: Callable[[Entry], None] = lambda _: None
        self.on_fault: Callable[[Entry, str], None] = lambda _, __: None
        self.on_broken: Callable[[Entry, str], bool] = lambda _, __: False
        supervisor.on_ready = self._load_all
        supervisor.on_lost = self._worker_lost

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def queue(self) -> Queue:
        """Those that wait, to be looked at."""
        return self._queue

    def limits_changed(self) -> None:
        """The limits are others from now on; what waits already keeps waiting."""
        self._queue.limit = self._limits.max_queue

    @property
    def running(self) -> int:
        """Requests that run: 0 or 1."""
        return int(self._running is not None)

    async def infer(self, client: int, entry: Entry, plan: Plan) -> dict[str, Any]:
        """The result of ModelInfer; raises what went wrong."""
        arrived = time.monotonic()
        work = self._new_work("Infer", plan.for_worker, self._limits.run_seconds, plan.regions)
        answer = await self._wait(client, entry, plan.priority, plan.timeout, work)
        queued = work.started - arrived
        self._count(entry, answer, queued, time.monotonic() - arrived)
        self._latencies.note(entry.name, work.version, answer["infer_ns"] * 1e-9, time.time())
        return plan.result(answer["raw"], round(queued * 1e6), round(answer["infer_ns"] / 1000))

    async def profile(self, client: int, entry: Entry, runs: int) -> dict[str, Any]:
        """The result of ModelProfile; raises what went wrong."""
        work = self._new_work("Profile", lambda key: {"key": key, "runs": runs}, _PROFILE_SECONDS, [])
        answer = await self._wait(client, entry, 2, _PROFILE_SECONDS, work)
        return {"name": entry.name, **answer}

    async def load(self, key: str, path: str) -> Loaded:
        """Have the worker build a compiled file and compare its answers with its probes.

        Inferences go on meanwhile, and wait for one probe at most. Raises ModelRefused where an answer is
        wrong, DeviceError where the device cannot build or hold the model, and WorkerLost where the worker
        died of it.
        """
        worker = self._supervisor.starts
        built = await self._supervisor.call(
            "Load", {"key": key, "path": path}, seconds=self._limits.load_seconds
        )
        outputs: list[dict[str, Any]] = []
        try:
            for probe in range(built["probes"]):
                outputs = (await self._careful("Check", {"key": key, "probe": probe}))["outputs"]
        except ModelRefused:
            self._in_background(self._tell("Unload", {"key": key}))
            raise
        return Loaded(worker, {"device": built["device"], "outputs": outputs})

    async def duel(self, old: str, new: str, rounds: int) -> Duel:
        """Two loaded files side by side, at least `rounds` runs each; inferences wait for one run at most.

        Stops at the first wrong answer. Raises WorkerLost where the worker died of it.
        """
        taken: tuple[list[int], list[int]] = ([], [])
        wrong, turn = "", 0
        while turn < 2 * rounds and not wrong:
            answer = await self._careful("Duel", {"old": old, "new": new, "turn": turn})
            taken[turn % 2].append(answer["ns"])
            wrong = answer["wrong"]
            rounds = max(rounds, answer["sets"])
            turn += 1
        return Duel(old=tuple(taken[0]), new=tuple(taken[1]), wrong=wrong)

    async def _careful(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """A call that runs a model; a device that failed in it is not used again."""
        answer = await self._supervisor.call(method, params, seconds=self._limits.run_seconds)
        if "spoilt" in answer:
            self._supervisor.kill(f"the device failed: {answer['spoilt']}")
            raise WorkerLost(answer["spoilt"])
        return answer

    @contextmanager
    def keeping(self, key: str) -> Iterator[None]:
        """While this lasts the worker keeps a compiled file that no name stands for yet."""
        self.keep(key)
        try:
            yield
        finally:
            self.let_go(key)

    def keep(self, key: str) -> None:
        """The worker keeps a compiled file until `let_go`, whatever the names stand for."""
        self._kept[key] += 1

    def let_go(self, key: str) -> None:
        """End one `keep`."""
        self._kept[key] -= 1
        self.unload(key)

    def unload(self, key: str) -> None:
        """Have the worker forget a compiled file, unless a name stands for it or it is kept."""
        if not self._registry.users(key) and not self._kept[key]:
            del self._kept[key]
            self._in_background(self._tell("Unload", {"key": key}))

    def drop_model(self, name: str, error: HonedError) -> None:
        """Answer everything that waits for a model with `error`."""
        for ticket in self._queue.drop_model(name):
            self._fail(ticket, error)

    def admit(self, entry: Entry, loaded: Loaded) -> None:
        """A model entered the registry; if its worker is gone since, the present one must load it too."""
        if self._supervisor.starts == loaded.worker and self._supervisor.state == "ready":
            entry.ready(loaded.checked)
            self._pump()
        else:
            self.reload()

    def reload(self) -> None:
        """Models of the registry may lack in the worker: have it load them."""
        if self._supervisor.state == "ready":
            self._in_background(self._load_all())

    def release(self, region: HeldRegion) -> None:
        """Let go of a region; with its last holder gone the worker unmaps it."""
        if region.release() and self._supervisor.forget(region.number):
            self._in_background(self._tell("Drop", {"region": region.number}))

    def forget_client(self, client: int) -> None:
        """A connection is gone; its requests are cancelled."""
        self._queue.forget_client(client)

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
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        return _Work(method=method, params=params, seconds=seconds, regions=regions, answer=answer)

    async def _wait(
        self, client: int, entry: Entry, priority: int, timeout: float, work: _Work
    ) -> dict[str, Any]:
        self._check_servable(entry)
        now, number = time.monotonic(), next(self._numbers)
        ticket = Ticket(
            number=number,
            client=client,
            model=entry.name,
            priority=priority,
            arrived=now,
            deadline=now + timeout,
        )
        self._queue.submit(ticket)
        self._work[number] = work
        for region in work.regions:
            region.hold()
        self._pump()
        try:
            async with asyncio.timeout(timeout):
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

    def _servable(self, name: str) -> bool:
        entry = self._registry.find(name)
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
            entry = self._registry.find(ticket.model)
            if entry is not None:
                entry.crashes = 0
                self.on_served(entry)
            if not work.answer.done():
                work.answer.set_result(answer)
        finally:
            self._running = None
            for region in work.regions:
                self.release(region)
            self._pump()

    async def _on_worker(self, model: str, work: _Work) -> dict[str, Any]:
        entry = self._registry.get(model)
        key, work.version = entry.key, entry.manifest.history.current.number
        work.started = time.monotonic()
        for region in work.regions:
            if not self._supervisor.knows(region.number):
                params = {"region": region.number, "offset": region.offset, "byte_size": region.byte_size}
                await self._supervisor.call("Map", params, [region.descriptor], seconds=work.seconds)
        return await self._supervisor.call(work.method, work.params(key), seconds=work.seconds)

    def _worker_failed(self, ticket: Ticket, work: _Work, error: HonedError) -> None:
        """Run the request once more in a new worker, or give up."""
        _log.error("model %s: attempt %d failed: %s", ticket.model, ticket.attempts, error)
        if isinstance(error, DeviceError):
            self._supervisor.kill(f"the device failed: {error}")  # its context may be spoilt
        entry = self._registry.find(ticket.model)
        if entry is not None:
            self._suspect = entry
            entry.crashes += 1
            if entry.crashes >= MAX_CRASHES:
                self._give_up(entry, f"{entry.crashes} workers in a row failed running it; last: {error}")
        entry = self._registry.find(ticket.model)
        usable = entry is not None and entry.state is not State.UNAVAILABLE
        if work.answer.done():
            return
        if entry is not None and usable and self._queue.retry(ticket):
            entry.statistics.retried()
            return
        _give(work.answer, Unavailable(f"the request failed in {ticket.attempts} workers; last: {error}"))

    def _give_up(self, entry: Entry, reason: str) -> None:
        if self.on_broken(entry, reason):
            return
        _log.error("model %s is not served any more: %s", entry.name, reason)
        entry.fail(reason)
        self.drop_model(entry.name, Unavailable(f"model {entry.name!r} cannot be used: {reason}"))

    def _worker_lost(self) -> None:
        """The worker ended: its models are gone with it."""
        for entry in self._registry.all():
            if entry.state is State.READY:
                entry.state = State.LOADING
        suspect, self._suspect = self._suspect, None
        if suspect is not None and not self._supervisor.ended_from_outside:
            self.on_fault(suspect, self._supervisor.reason)
        if self._supervisor.state == "failed":
            for ticket in self._queue.drop_all():
                self._fail(ticket, Unavailable(f"the worker does not start ({self._supervisor.reason})"))

    async def _load_all(self) -> None:
        """Give a fresh worker its models, those that requests wait for first."""
        wanted = self._queue.models()
        entries = [entry for entry in self._registry.all() if entry.state is State.LOADING]
        for entry in sorted(entries, key=lambda e: (e.load_crashes, e.name not in wanted)):
            if self._registry.find(entry.name) is not entry or entry.state is not State.LOADING:
                continue
            try:
                await self._load_entry(entry)
            except WorkerLost:
                return  # the next worker's turn
            if self._registry.find(entry.name) is not entry:
                self.unload(entry.key)  # it was removed meanwhile
            self._pump()

    async def _load_entry(self, entry: Entry) -> None:
        twin = self._twin(entry)
        if twin is not None:
            entry.ready(twin.checked)
            return
        try:
            loaded = await self.load(entry.key, str(self._store.object(entry.manifest.compiled)))
            entry.ready(loaded.checked)
        except WorkerLost as error:
            entry.load_crashes += 1
            if entry.load_crashes > 1:
                self._give_up(entry, f"{entry.load_crashes} workers failed loading it; last: {error}")
            raise
        except HonedError as error:
            self._give_up(entry, str(error))

    def _twin(self, entry: Entry) -> Entry | None:
        """A ready model of the same compiled file."""
        for other in self._registry.all():
            if other is not entry and other.key == entry.key and other.state is State.READY:
                return other
        return None

    def _fail(self, ticket: Ticket, error: HonedError) -> None:
        _give(self._work[ticket.number].answer, error)

    def _count(self, entry: Entry, answer: dict[str, Any], queued: float, whole: float) -> None:
        served = Served(
            queued=queued,
            whole=whole,
            input_ns=answer["input_ns"],
            infer_ns=answer["infer_ns"],
            output_ns=answer["output_ns"],
            launches=launches(entry.compiled) if entry.compiled else 0,
        )
        entry.statistics.served(served, time.monotonic(), time.time_ns() // 1_000_000)

    async def _tell(self, method: str, params: dict[str, Any]) -> None:
        """A call whose answer changes nothing; a worker that is gone has forgotten anyway."""
        try:
            await self._supervisor.call(method, params, seconds=self._limits.run_seconds)
        except WorkerLost:
            pass
        except HonedError as error:
            _log.warning("the worker refused %s: %s", method, error)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def removed(name: str) -> NotFound:
    """The error for requests whose model was removed while they waited."""
    return NotFound(f"model {name!r} was removed; 'hone list' shows which there are")


def _give(answer: asyncio.Future[dict[str, Any]], error: HonedError) -> None:
    if not answer.done():
        answer.set_exception(error)
