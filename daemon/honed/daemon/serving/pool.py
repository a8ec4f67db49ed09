"""Manages the engines of the service: reports events to the core, and performs the actions it returns."""

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
from honed.daemon.settings.places import users_cache
from honed.daemon.settings.schema import CpuSettings, Limits, Service
from honed.daemon.store.inspector import Inspector
from honed.daemon.store.store import Store
from honed.daemon.worker.supervisor import WorkerProgram, device_program
from honed.machine.bundle import has_cpu_engine
from honed.protocol.errors import HonedError, Unavailable
from honed.runtime.engines import PartLimits

from .engine_server import EngineServer
from .in_flight import InFlightRequests
from .loader import VersionComparer
from .selection import Placement, choose, compare_again

_log = logging.getLogger(__name__)

USERS_NICENESS = 5  # Niceness of users' CPU engines, so that the shared ones come first
_PASSED_SECONDS = 5.0  # Interval of Tick events
_SETTLING_SECONDS = 15.0  # Maximum wait for a device to start before the next one is started


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The configuration of engines; `user_mib` limits a user's CPU engine, `policy` is serve.engine."""

    service: Service
    limits: Limits
    cpu: CpuSettings
    user_mib: int
    policy: str


class EngineManager:
    """The manager of the service's engines and their requests; it only reads `models`."""

    def __init__(
        self,
        settings: EngineSettings,
        models: Registry,
        store: Store,
        persist: Callable[[ServedModel], Coroutine[Any, Any, None]],
        inspector: Inspector,
        latencies: Latencies,
    ) -> None:
        """Initialise; nothing runs yet. `persist` stores the manifest of a model."""
        service, limits = settings.service, settings.limits
        self._settings = settings
        self._limits = limits
        self._models = models
        self._store = store
        self._persist = persist
        self._inspector = inspector
        self.placement = Placement(service.device, service.devices, service.placement)
        self._machine = Machine(
            models,
            self.placement.names,
            service.fallback,
            limits.max_queue,
            cpu=has_cpu_engine(),
            policy=settings.policy,
        )
        self.servers = {name: self._server(engine) for name, engine in self._machine.engines.items()}
        self.requests = InFlightRequests(
            self.handle, self._on_event, limits, self.servers, models, store, latencies
        )
        self._doing: deque[messages.Action] = deque()  # Actions to perform, in the machine's order
        self._performing = False
        # Returns a feature's comparison of a model's versions; None: plain runs compare versions and engines.
        self.version_comparer: Callable[[ServedModel], VersionComparer | None] = lambda _: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False  # Set at shutdown: events are ignored
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
                # A user's own cache: a shared one would reveal which files others have verified.
                cache_dir = users_cache(cache_dir, engine.owner)
        else:
            parts = PartLimits(threads=cpu.threads, memory_mib=cpu.memory_mib)
            program = device_program(
                engine.name, self._limits.worker_memory_mib, parts, self._limits.compile_memory_mib
            )
        return EngineServer(engine, program, self._limits, cache_dir, self._models, self._store)

    @property
    def cpu(self) -> EngineServer | None:
        """The shared CPU engine; None if it is not installed."""
        return self.servers.get(CPU_ENGINE)

    def cpu_for(self, owner: int | None) -> EngineServer | None:
        """Return the CPU engine for a user's own models; None if it is not installed.

        `owner` None stands for the models of administrators.
        """
        engine = self._machine.cpu_of(owner)
        self._make_servers()
        return self.servers[engine.name] if engine is not None else None

    def require_cpu(self, owner: int | None) -> EngineServer:
        """Return the CPU engine for a user's own models; raise Unavailable if it is not installed.

        `owner` None stands for the models of administrators.
        """
        found = self.cpu_for(owner)
        if found is None:
            raise Unavailable("the CPU engine is not installed; install honed-cpu (apt install honed-cpu)")
        return found

    def _make_servers(self) -> None:
        """Create servers for engines that the machine has added."""
        for name, engine in self._machine.engines.items():
            if name not in self.servers:
                self.servers[name] = self._server(engine)

    @property
    def default(self) -> EngineServer:
        """The engine of models that are not placed on another one."""
        return self.servers[self.placement.default]

    # Events and actions of the machine

    def handle(self, event: messages.Event) -> None:
        """Pass an event to the machine, and perform its actions; raise HonedError if it is refused."""
        self._doing.extend(self._machine.handle(event, time.monotonic(), time.time()))
        if len(self.servers) < len(self._machine.engines):
            self._make_servers()
        if self._performing:  # The event comes from an action being performed; the loop below continues
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
                self.requests.finish(request)
            case messages.Refuse(request, error):
                self.requests.finish(request, error)
            case messages.CompareCanary(model):
                self._begin(self._follow(self.of(model).loader.judge(action, self.version_comparer(model))))
            case messages.Persist(model):
                self._begin(self._persist(model))
            case messages.CompareEngines(model):
                self._begin(self._follow(self.compare_engines(model)))
            case messages.InspectFile(model):
                self._begin(self._follow(self._inspect(model)))
            case messages.Log(sentence, failed):
                _log.log(logging.ERROR if failed else logging.INFO, "%s", sentence)
            case _:
                self._perform_on_server(action)

    def _perform_on_server(self, action: messages.Action) -> None:
        """Perform an action on an engine's worker; what runs on it ends with it."""
        match action:
            case messages.Load(engine):
                server = self.servers[engine]
                server.with_worker(self._begin(self._follow(server.loader.restore(action))))
            case messages.VerifyProbe(engine):
                server = self.servers[engine]
                server.with_worker(self._begin(self._follow(server.loader.prove(action))))
            case messages.Unload(engine, key):
                server = self.servers[engine]
                server.with_worker(self._begin(server.loader.unload(key)))
            case messages.Kill(engine, reason):
                self.servers[engine].supervisor.kill(reason)
            case messages.StartServer(engine):
                self._start(engine)
            case messages.StopServer(engine):
                self._begin(self._follow(self._stop(self.servers[engine])))

    def _run(self, action: messages.Run) -> None:
        if (work := self.requests.run(action)) is not None:
            self._begin(work)

    def _on_event(self, event: messages.Event) -> None:
        """Handle the event that ends a run; an unexpected error ends the service, as one of a task does."""
        try:
            if not self._closed:
                self.handle(event)
        except Exception as error:  # noqa: BLE001 - an unexpected error ends the service
            if not self._failure.done():
                self._failure.set_exception(error)

    async def _follow(self, work: Coroutine[Any, Any, messages.Event | None]) -> None:
        """Await work, and handle the event that it returns, if any."""
        event = await work
        if event is not None:
            self.handle(event)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[None]) -> None:
        """Discard a task that ended; one that failed unexpectedly ends the service."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _inspect(self, model: ServedModel) -> messages.Event | None:
        """Read the compiled file of a version that serves again after a rollback."""
        try:
            read = await self._inspector.inspect(self._store.form(model.manifest, model.key))
        except HonedError as error:  # The worker fails to load it, too, and the core handles that
            _log.error("model %s: its earlier version cannot be read: %s", model.name, error)
            return None
        return messages.Inspected(model.number, read)

    def comparable(self, model: ServedModel) -> bool:
        """Return whether `compare_engines` may be called for a model now."""
        return self.version_comparer(model) is None and comparable(self._machine, model)

    async def compare_engines(self, model: ServedModel) -> messages.Event:
        """Compare both engines again; return the event that reports the result."""
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
        """Keep a worker on each device until cancelled; no worker is left when this returns."""
        try:
            for name in self.placement.names:
                self._start(name)
                # Devices start in sequence, so that peaks are not measured on two at a time.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.servers[name].wait_ready_or_failed(), _SETTLING_SECONDS)
                server = self.servers[name]
                spec = server.engine.spec
                for other in self.servers.values():
                    if other is not server and spec and other.engine.spec == spec:
                        message = "%r and %r are one device, %s; name it once in the configuration"
                        _log.warning(message, other.name, server.name, server.label)
            self._begin(self._tell_time())
            await self._failure
        finally:
            self._closed = True
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_time(self) -> None:
        """Send a Tick every few seconds if there is a CPU engine, which depends on it."""
        while self.cpu is not None:
            await asyncio.sleep(_PASSED_SECONDS)
            self.handle(messages.Tick())

    def _start(self, name: str) -> None:
        server = self.servers[name]
        server.running = self._begin(server.run(self.handle))

    async def _stop(self, server: EngineServer) -> messages.Event:
        if server.running is not None:
            server.running.cancel()
            await asyncio.wait([server.running])
        return messages.ServerStopped(server.name)

    # Requests

    def wake(self, name: str, *, on_device: bool = False) -> None:
        """Put a suspended variant back into service, by the chosen engine or `on_device`.

        Do nothing for other models.
        """
        variant = self._models.variant(name)
        if variant is None or not self._models.is_suspended(variant):
            return
        manifest, cpu = variant.manifest, variant.manifest.decision.chosen == "cpu" and not on_device
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
        """Wait up to `seconds` for requests to finish, then refuse the rest with Unavailable."""
        await self.requests.wait_until_answered(seconds)
        self.handle(messages.Stopping())
        await self.requests.wait_until_delivered()

    # Placement of models

    def of(self, model: ServedModel) -> EngineServer:
        """Return the engine that serves a model now."""
        return self.servers[model.engine]

    def device_of(self, model: ServedModel) -> EngineServer:
        """Return the engine that runs a model's compiled file."""
        return self.servers[model.device]

    def check_at_home(self, model: ServedModel) -> None:
        """Raise Unavailable if the model has failed over to another engine."""
        if model.failover_reason:
            raise Unavailable(
                f"{model.name} has its versions changed on its own device only; {model.failover_reason}"
            )

    def engines_for(self, model: str, device: str) -> list[EngineServer]:
        """Return the engines that a user's `device` selects: several for "fastest". Raises NotFound."""
        known = {name: each.engine.spec for name, each in self.servers.items() if not each.engine.on_demand}
        return [self.servers[name] for name in self.placement.select(model, device, known)]

    def home(self, model: str, device: str = "", why: str = "") -> EngineServer:
        """Return the preferred engine of a model that was added for `device`, "" for any."""
        return self.servers[self.placement.home(model, device, why).device]

    @contextmanager
    def keeping(self, server: EngineServer, key: str) -> Iterator[None]:
        """Pin a compiled file that no model has yet in a worker, within the context."""
        self.handle(messages.FileRetained(server.name, key))
        try:
            yield
        finally:
            self.handle(messages.FileReleased(server.name, key))

    # Reports

    @property
    def ready(self) -> bool:
        """Return whether an engine has a worker, and no engine that serves models is starting."""
        engines = [server.engine for server in self.servers.values() if not server.engine.stops_when_unused]
        phases = {each.phase for each in engines if not each.on_demand or self._models.of(each.name)}
        return Phase.STARTING not in phases and any(each.phase is Phase.READY for each in engines)

    def waiting(self) -> Counter[str]:
        """Return the number of waiting requests by model."""
        total: Counter[str] = Counter()
        for server in self.servers.values():
            total.update(server.engine.queue.by_model())
        return total

    def workers(self) -> frozenset[int]:
        """Return the ids of all workers and builders, and of recently ended workers."""
        supervisors = [server.supervisor for server in self.servers.values()]
        ended = {end.pid for supervisor in supervisors for end in supervisor.last_ends}
        building = {pid for server in self.servers.values() for pid in server.loader.builder.pids}
        return frozenset(ended | building | {supervisor.pid for supervisor in supervisors}) - {0}
