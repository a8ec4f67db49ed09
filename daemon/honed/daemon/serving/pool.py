"""The engines of the service at work: reports events to the core, and performs the actions it returns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from honed.daemon.core import messages
from honed.daemon.core.engines import comparable
from honed.daemon.core.machine import Machine
from honed.daemon.core.model import CPU_ENGINE, Engine, Phase, ServedModel, is_cpu
from honed.daemon.core.queue import ClientId
from honed.daemon.core.state import Registry
from honed.daemon.observe.latencies import Latencies
from honed.daemon.settings import places
from honed.daemon.settings.placement import Placement
from honed.daemon.settings.places import users_cache
from honed.daemon.settings.schema import CpuSettings, Limits, Service
from honed.daemon.store.inspect import Inspector
from honed.daemon.store.store import Store
from honed.daemon.worker.supervisor import WorkerProgram, device_program
from honed.protocol.errors import HonedError, Unavailable
from honed.runtime.engines import PartLimits

from .action_log import log_action
from .commits import StoreWriter
from .engine_server import EngineServer
from .in_flight import InFlightRequests
from .loader import VersionComparer
from .selection import choose, compare_again

_log = logging.getLogger(__name__)

USERS_NICENESS = 5  # Of users' CPU engines: what all use comes first
_PASSED_SECONDS = 5.0  # Between two looks at what is not used any more
_SETTLING_SECONDS = 15.0  # That a device which hangs may keep the next one waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The configuration of engines; `user_mib` is of a user's CPU engine, `policy` serve.engine."""

    service: Service
    limits: Limits
    cpu: CpuSettings
    user_mib: int
    policy: str


class EngineManager:
    """Every device server of one service. `models` are those that they serve, to be looked at."""

    def __init__(
        self,
        settings: EngineSettings,
        models: Registry,
        store: Store,
        commits: StoreWriter,
        inspector: Inspector,
        latencies: Latencies,
    ) -> None:
        """Initialise; nothing runs yet."""
        service, limits = settings.service, settings.limits
        self._settings = settings
        self._limits = limits
        self._models = models
        self._store = store
        self._commits = commits
        self._inspector = inspector
        self.placement = Placement(service.device, service.devices, service.placement)
        self._machine = Machine(
            models,
            self.placement.names,
            service.fallback,
            limits.max_queue,
            cpu=places.cpu_engine(),
            policy=settings.policy,
        )
        self.servers = {name: self._server(engine) for name, engine in self._machine.engines.items()}
        self.requests = InFlightRequests(
            self.handle, self._on_event, limits, self.servers, models, store, latencies
        )
        self._doing: deque[messages.Action] = deque()  # What the machine wants done, in its order
        self._performing = False
        # How a feature compares versions of a model, and then its engines, too; None: it does not.
        self.version_comparer: Callable[[ServedModel], VersionComparer | None] = lambda _: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False  # The workers go, and nothing more is done
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _server(self, engine: Engine) -> EngineServer:
        cache_dir, cpu = self._settings.service.cache_dir, self._settings.cpu
        if is_cpu(engine.name):
            users = engine.owner is not None
            memory_mib = self._settings.user_mib if users else cpu.memory_mib
            program = WorkerProgram(
                module="honed.cpu.worker",
                argument=str(cpu.threads),
                memory_mib=memory_mib,
                setting="apps.memory_mib" if users else "cpu.memory_mib",
                niceness=USERS_NICENESS if users else 0,
            )
            if engine.owner is not None:
                # What others' files were proven to do is not known here: that would tell of them.
                cache_dir = users_cache(cache_dir, engine.owner)
        else:
            parts = PartLimits(threads=cpu.threads, memory_mib=cpu.memory_mib)
            program = device_program(
                engine.name, self._limits.worker_memory_mib, parts, self._limits.compile_memory_mib
            )
        return EngineServer(engine, program, self._limits, cache_dir, self._models, self._store)

    @property
    def cpu(self) -> EngineServer | None:
        """The CPU engine; None where it is not installed."""
        return self.servers.get(CPU_ENGINE)

    def cpu_for(self, owner: int | None) -> EngineServer | None:
        """Return the CPU engine for a user's own models; None where it is missing.

        `owner` None stands for the models of administrators.
        """
        name = self._machine.cpu_for(owner)
        self._make_servers()
        return self.servers[name] if name is not None else None

    def needed_cpu(self, owner: int | None) -> EngineServer:
        """Return the CPU engine for a user's own models; raise Unavailable where it is missing.

        `owner` None stands for the models of administrators.
        """
        found = self.cpu_for(owner)
        if found is None:
            raise Unavailable("the CPU engine is not installed; install honed-cpu (apt install honed-cpu)")
        return found

    def _make_servers(self) -> None:
        """Make the servers of engines that the machine has added meanwhile."""
        for name, engine in self._machine.engines.items():
            if name not in self.servers:
                self.servers[name] = self._server(engine)

    @property
    def default(self) -> EngineServer:
        """The one for models that are not placed elsewhere."""
        return self.servers[self.placement.default]

    # The machine, and what it wants done

    def handle(self, event: messages.Event) -> None:
        """Handle an event. Raises a HonedError where the event is refused, which changes nothing."""
        self._doing.extend(self._machine.handle(event, time.monotonic(), time.time()))
        if len(self.servers) < len(self._machine.engines):
            self._make_servers()
        if self._performing:  # What is performed has led to this event: one after the other
            return
        self._performing = True
        try:
            while self._doing:
                self._perform(self._doing.popleft())
        finally:
            self._performing = False

    def _perform(self, action: messages.Action) -> None:
        match action:
            case messages.Run():
                self._run(action)
            case messages.EndRun():
                self.requests.end_run(action)
            case messages.Answer(request):
                self.requests.answer(request)
            case messages.Refuse(request, error):
                self.requests.refuse(request, error)
            case messages.Load() | messages.VerifyProbe() | messages.Unload() | messages.Kill():
                self._perform_on_worker(action, self.servers[action.engine])
            case messages.StartServer(engine):
                self._start(engine)
            case messages.StopServer(engine):
                self._begin(self._follow(self._stopped(self.servers[engine])))
            case messages.CompareCanary(model):
                self._begin(self._follow(self.of(model).loader.judge(action, self.version_comparer(model))))
            case messages.Persist(model):
                self._begin(self._commits.persist(model))
            case messages.CompareEngines(model):
                self._begin(self._follow(self.compared(model)))
            case messages.InspectFile(model):
                self._begin(self._follow(self._inspected(model)))
            case _:
                log_action(action)

    def _perform_on_worker(
        self,
        action: messages.Load | messages.VerifyProbe | messages.Unload | messages.Kill,
        server: EngineServer,
    ) -> None:
        """Perform an action that ends with the present worker at the latest."""
        match action:
            case messages.Load():
                server.with_worker(self._begin(self._follow(server.loader.restore(action))))
            case messages.VerifyProbe():
                server.with_worker(self._begin(self._follow(server.loader.prove(action))))
            case messages.Unload(_, key):
                server.with_worker(self._begin(server.loader.unload(key)))
            case messages.Kill(_, reason):
                server.supervisor.kill(reason)

    def _run(self, action: messages.Run) -> None:
        if (work := self.requests.run(action)) is not None:
            self._begin(work)

    def _on_event(self, event: messages.Event) -> None:
        """Handle what a worker's answer amounts to, as a task would."""
        try:
            if not self._closed:
                self.handle(event)
        except Exception as error:  # noqa: BLE001 - what fails in a way nobody foresaw ends the service
            if not self._failure.done():
                self._failure.set_exception(error)

    async def _follow(self, work: Coroutine[Any, Any, messages.Event | None]) -> None:
        """Await something that ends in an event, and handle that."""
        event = await work
        if event is not None:
            self.handle(event)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Discard a task that ended; one that failed unexpectedly ends the service."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _inspected(self, model: ServedModel) -> messages.Event | None:
        """Read the file of a version that was gone back to."""
        try:
            read = await self._inspector.inspect(self._store.form(model.manifest, model.key))
        except HonedError as error:  # The worker finds so, too, and says it of the model
            _log.error("model %s: its earlier version cannot be read: %s", model.name, error)
            return None
        return messages.Inspected(model.number, read)

    def comparable(self, model: ServedModel) -> bool:
        """Return whether `compared` may be called for a model now."""
        return self.version_comparer(model) is None and comparable(self._machine, model)

    async def compared(self, model: ServedModel) -> messages.Event:
        """Compare both engines once more; return the event that reports the result."""
        if self.version_comparer(model) is not None:
            return messages.EnginesNotCompared(model.number)
        device, cpu, manifest = self.servers[model.device], self.servers[model.cpu_engine], model.manifest
        with self.keeping(device, model.key), self.keeping(cpu, manifest.source_key):
            try:
                seconds = self._limits.load_seconds
                times = await compare_again(device, cpu, manifest, self._store, seconds)
            except HonedError as error:
                _log.warning("model %s: its engines are not compared again: %s", model.name, error)
                return messages.EnginesNotCompared(model.number)
        choice = choose(times, manifest.owner)
        return messages.EngineChosen(model=model.number, engine=choice.engine, why=choice.why, times=times)

    # Device servers

    async def run(self) -> None:
        """Keep a worker on each device until cancelled; they are gone when this returns."""
        try:
            for name in self.placement.names:
                self._start(name)
                # One after the other: where peaks are measured, they are not measured side by side.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.servers[name].wait_ready_or_failed(), _SETTLING_SECONDS)
                server = self.servers[name]
                spec = server.engine.spec
                for other in self.servers.values():
                    if other is not server and spec and other.engine.spec == spec:
                        message = "%r and %r are one device, %s; name it once in the configuration"
                        _log.warning(message, other.name, server.name, server.shown)
            self._begin(self._tell_time())
            await self._failure
        finally:
            self._closed = True
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_time(self) -> None:
        """Report the time now and then, where something depends on it."""
        while self.cpu is not None:
            await asyncio.sleep(_PASSED_SECONDS)
            self.handle(messages.Tick())

    def _start(self, name: str) -> None:
        server = self.servers[name]
        server.running = self._begin(server.run(self.handle))

    async def _stopped(self, server: EngineServer) -> messages.Event:
        if server.running is not None:
            server.running.cancel()
            await asyncio.wait([server.running])
        return messages.ServerStopped(server.name)

    # Requests

    def wake(self, name: str) -> None:
        """Have a variant that rests in service; nothing else is changed by it."""
        variant = self._models.variant(name)
        if variant is None or not self._models.is_suspended(variant):
            return
        manifest, cpu = variant.manifest, variant.manifest.decision.chosen == "cpu"
        self.handle(
            messages.Added(
                manifest=manifest,
                compiled=variant.compiled,
                preferred_engine=variant.device,
                proof=None,
                cpu=cpu,
            )
        )

    def forget_client(self, client: ClientId) -> None:
        """Cancel the requests of a connection that is gone."""
        self.handle(messages.ClientGone(client))

    def limits_changed(self) -> None:
        """Apply limits that have changed."""
        self._machine.limit_queues(self._limits.max_queue)

    async def drain(self, seconds: float) -> None:
        """Let what is queued finish for so long, then answer the rest with Unavailable."""
        await self.requests.answered(seconds)
        self.handle(messages.Stopping())
        await self.requests.taken_all()

    # Where models are

    def of(self, model: ServedModel) -> EngineServer:
        """Return the device server that serves a model now."""
        return self.servers[model.engine]

    def device_of(self, model: ServedModel) -> EngineServer:
        """Return the device server that has the model's compiled form."""
        return self.servers[model.device]

    def check_at_home(self, model: ServedModel) -> None:
        """Raise Unavailable where another device stands in for the model's own."""
        if model.failover_reason:
            raise Unavailable(
                f"{model.name} has its versions changed on its own device only; {model.failover_reason}"
            )

    def asked(self, model: str, device: str) -> list[EngineServer]:
        """Return the device servers that a user's words mean: several for "fastest". Raises NotFound."""
        known = {name: each.engine.spec for name, each in self.servers.items() if not each.engine.on_demand}
        return [self.servers[name] for name in self.placement.asked(model, device, known)]

    def home(self, model: str, device: str = "", why: str = "") -> EngineServer:
        """Return where a model belongs that was added for `device`, "" for any."""
        return self.servers[self.placement.home(model, device, why).device]

    @contextmanager
    def keeping(self, server: EngineServer, key: str) -> Iterator[None]:
        """Have the worker keep a compiled file that no name stands for yet, while this lasts."""
        self.handle(messages.FileRetained(server.name, key))
        try:
            yield
        finally:
            self.handle(messages.FileReleased(server.name, key))

    # What is shown

    @property
    def ready(self) -> bool:
        """Whether some device has a worker, and none that serves models is about to get one."""
        engines = [server.engine for server in self.servers.values() if not server.engine.stops_when_unused]
        phases = {each.phase for each in engines if not each.on_demand or self._models.of(each.name)}
        return Phase.STARTING not in phases and any(each.phase is Phase.READY for each in engines)

    def waiting(self) -> Counter[str]:
        """Return how many requests wait, by model."""
        total: Counter[str] = Counter()
        for server in self.servers.values():
            total.update(server.engine.queue.by_model())
        return total

    def workers(self) -> frozenset[int]:
        """Return the ids of the processes that serve, and of the last ones that did."""
        supervisors = [server.supervisor for server in self.servers.values()]
        ended = {end.pid for supervisor in supervisors for end in supervisor.last_ends}
        building = {pid for server in self.servers.values() for pid in server.loader.builder.pids}
        return frozenset(ended | building | {supervisor.pid for supervisor in supervisors}) - {0}
