"""Provides the service's side of an engine: its worker, and the loader of models into it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from honed.daemon.core.messages import LoadReport, WorkerLost, WorkerReady
from honed.daemon.core.model import Engine, Phase, is_cpu
from honed.daemon.core.state import Registry
from honed.daemon.settings.schema import Limits
from honed.daemon.store.store import Store
from honed.daemon.worker.builder import Progress
from honed.daemon.worker.calls import DropRegion
from honed.daemon.worker.supervisor import Supervisor, WorkerDied, WorkerProgram
from honed.protocol.errors import DeviceError, ModelRefused, Unavailable
from honed.protocol.service import QueueStatus, WorkerStatus
from honed.protocol.values import DeviceIdentity, DevicePeaks

from .loader import Loader

_ENGINE_MIB = 80  # Minimum memory of an engine's process without models
_ENDED_DRIVER = (
    "the device's driver failed twice while it loaded the model; try another precision, or update the driver"
)
_ENDED_ONNX_RUNTIME = "the model ended ONNX Runtime's process twice while it was loaded; export it again"


class EngineServer:
    """The keeper of the worker of a device or a CPU engine; `engine` is its state in the core."""

    def __init__(
        self,
        engine: Engine,
        program: WorkerProgram,
        limits: Limits,
        cache_dir: Path,
        models: Registry,
        store: Store,
    ) -> None:
        """Initialise; nothing runs yet."""
        self.engine = engine
        self._limits = limits
        self.supervisor = Supervisor(
            engine.name, limits, cache_dir, program, lambda: bool(models.of(engine.name))
        )
        self.loader = Loader(engine, limits, self.supervisor, models, store, cache_dir)
        self.running: asyncio.Task[None] | None = None
        self._with_worker: set[asyncio.Task[None]] = set()
        self._turned = asyncio.Event()  # Set after each start and end of a worker was reported to the core

    @property
    def name(self) -> str:
        """The name of the device as configured, "" for the best one, or of a CPU engine."""
        return self.engine.name

    @property
    def label(self) -> str:
        """The device's name for messages: the full name once a worker reported it."""
        return self.engine.label

    @property
    def ready(self) -> bool:
        """Return whether the engine has a worker that accepts calls."""
        return self.engine.phase is Phase.READY and self.supervisor.reachable

    async def run(self, tell: Callable[[WorkerReady | WorkerLost], None]) -> None:
        """Keep a worker until cancelled, and pass its starts and ends to `tell`; no process is left then."""

        def on_turn(event: WorkerReady | WorkerLost) -> None:
            if isinstance(event, WorkerLost):
                self._end_with_worker()
            tell(event)
            self._turned.set()

        try:
            await self.supervisor.run(on_turn)
        finally:
            self._end_with_worker()
            await self.loader.builder.kill()

    async def wait_ready_unbounded(self) -> None:
        """Wait until the engine is ready, without a limit."""
        while not self.ready:
            await self._turn()

    async def wait_ready_or_failed(self) -> None:
        """Wait until the engine is ready or has failed."""
        while not self.ready and self.engine.phase is not Phase.FAILED:
            await self._turn()

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the engine is ready; raise Unavailable if it is not within `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait_ready_or_failed()
        if not self.ready:
            raise Unavailable(f"{self.engine.not_starting}; 'hone doctor' may know why")

    async def load(
        self,
        key: str,
        path: Path,
        progress: Progress = lambda _, __: None,
        *,
        foreground: bool = True,
    ) -> LoadReport:
        """Load and verify a file in the engine's worker; raise ModelRefused if two workers crash on it."""
        for last in (False, True):
            await self.wait_ready(self._limits.load_seconds)
            try:
                return await self.loader.load(key, str(path), foreground=foreground, progress=progress)
            except DeviceError as error:
                raise ModelRefused("this device cannot run the model", (str(error),)) from error
            except WorkerDied as error:
                if last:
                    ended = _ENDED_ONNX_RUNTIME if is_cpu(self.name) else _ENDED_DRIVER
                    raise ModelRefused(ended, (str(error),)) from error
        raise AssertionError("the loop above returns or raises")

    def check_fits(self, nbytes: int) -> None:
        """Raise ModelRefused if a model of `nbytes` in memory does not fit into the engine's process."""
        program, profile = self.supervisor.program, self.supervisor.profile
        if profile is None or profile.limits.host_unified:  # A discrete device has memory of its own
            needs = _ENGINE_MIB + (nbytes >> 20)
            check_memory("loading it", needs, program.memory_mib, program.setting)

    async def _turn(self) -> None:
        self._turned.clear()
        await self._turned.wait()

    def with_worker(self, task: asyncio.Task[None]) -> None:
        """Cancel a task when the present worker ends, unless it has ended before."""
        self._with_worker.add(task)
        task.add_done_callback(self._with_worker.discard)

    def drop_region(self, number: int) -> None:
        """Have the worker unmap a region that has no holder any more."""
        if self.supervisor.forget(number):
            self.with_worker(asyncio.ensure_future(self.loader.tell(DropRegion(region=number))))

    @property
    def identity(self) -> DeviceIdentity | None:
        """The identity of the device; None until a worker reported it."""
        return self.supervisor.identity

    @property
    def peaks(self) -> DevicePeaks | None:
        """The measured peaks of the device; None if they are not known."""
        profile = self.supervisor.profile
        return profile.peaks if profile else None

    def worker(self) -> WorkerStatus:
        """Return the engine's process, as ServerStatus shows it."""
        return WorkerStatus(
            state=self.engine.state,
            pid=self.supervisor.pid,
            restarts=max(0, self.supervisor.starts - 1),
            reason=self.engine.reason,
        )

    def queue(self) -> QueueStatus:
        """Return the numbers of waiting and running requests."""
        return QueueStatus(waiting=len(self.engine.queue), running=len(self.engine.running))

    def _end_with_worker(self) -> None:
        for task in self._with_worker:
            task.cancel()


def check_memory(doing: str, needs: int, most: int, setting: str) -> None:
    """Raise ModelRefused if something needs more MiB than `most`, the value of `setting`; 0: no limit."""
    if most and needs > most:
        raise ModelRefused(
            f"{doing} takes at least {needs:,} MiB of memory, more than the {most:,} MiB of {setting}; "
            "use a smaller model, or raise that in the configuration where the machine has more"
        )
