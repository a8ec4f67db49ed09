"""An engine that serves: its worker, and what is loaded into that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from honed.daemon.core.messages import WorkerLost, WorkerReady
from honed.daemon.core.model import Engine, Phase, kind_of
from honed.daemon.core.state import Registry
from honed.daemon.settings.schema import Limits
from honed.daemon.store.store import Store
from honed.daemon.worker.calls import DropRegion
from honed.daemon.worker.supervisor import Life, Supervisor, WorkerProgram
from honed.protocol.results import DeviceIdentity, DevicePeaks
from honed.protocol.service import QueueStatus, WorkerStatus

from .loader import Loader


class DeviceServer:
    """Keeps a worker on a device, or for the CPU engine, whose state as an engine the machine knows."""

    def __init__(
        self,
        engine: Engine,
        program: WorkerProgram,
        limits: Limits,
        cache_dir: Path,
        models: Registry,
        store: Store,
    ) -> None:
        """Nothing runs yet."""
        self.engine = engine
        self.supervisor = Supervisor(limits, cache_dir, program)
        self.loader = Loader(engine, limits, self.supervisor, models, store, cache_dir)
        self.running: asyncio.Task[None] | None = None
        self._models = models
        self._with_worker: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """The device's as configured, "" for the best there is."""
        return self.engine.name

    @property
    def shown(self) -> str:
        """The device for people: its full name once it was seen."""
        return self.engine.shown

    @property
    def kind(self) -> str:
        """The kind of engine that it is."""
        return kind_of(self.name)

    @property
    def state(self) -> str:
        """The state of its worker; "resting" for a stand-in that is not needed."""
        resting = self.engine.phase in (Phase.RESTING, Phase.STOPPING)
        return Phase.RESTING.value if resting else self.supervisor.state

    async def lives(self) -> AsyncGenerator[WorkerReady | WorkerLost, None]:
        """Keep a worker until closed, and tell what happens to it; no process of the device is left then."""
        supervisor = self.supervisor
        supervisor.expects_models = bool(self._models.of(self.name))
        try:
            async with contextlib.aclosing(supervisor.lives()) as lives:
                async for life in lives:
                    if life is Life.BEGUN:
                        yield self._ready()
                    else:
                        self._end_with_worker()
                        yield self._lost()
                        supervisor.expects_models = bool(self._models.of(self.name))
        finally:
            self._end_with_worker()
            await self.loader.builder.kill()

    def with_worker(self, task: asyncio.Task[None]) -> None:
        """Cancel it when the present worker ends, if not before."""
        self._with_worker.add(task)
        task.add_done_callback(self._with_worker.discard)

    def drop_region(self, number: int) -> None:
        """Nobody holds a region any more: have the worker unmap it."""
        if self.supervisor.forget(number):
            self.with_worker(asyncio.ensure_future(self.loader.tell(DropRegion(region=number))))

    @property
    def identity(self) -> DeviceIdentity | None:
        """None before the device was seen."""
        return self.supervisor.identity

    @property
    def peaks(self) -> DevicePeaks | None:
        """The device's, as measured; None where they are not known."""
        profile = self.supervisor.profile
        return profile.peaks if profile else None

    def worker(self) -> WorkerStatus:
        """Its process, as ServerStatus shows it."""
        return WorkerStatus(
            state=self.state,
            pid=self.supervisor.pid,
            restarts=max(0, self.supervisor.starts - 1),
            reason=self.supervisor.reason,
        )

    def queue(self) -> QueueStatus:
        """Requests that wait and run."""
        return QueueStatus(waiting=len(self.engine.queue), running=int(self.engine.running is not None))

    def _ready(self) -> WorkerReady:
        profile = self.supervisor.profile
        return WorkerReady(
            engine=self.name,
            worker=self.supervisor.starts,
            spec=self.supervisor.spec,
            family=profile.rules.family if profile is not None else "",
            fingerprint=self.supervisor.fingerprint,
        )

    def _lost(self) -> WorkerLost:
        return WorkerLost(
            engine=self.name,
            reason=self.supervisor.reason,
            from_outside=self.supervisor.ended_from_outside,
            failed=self.supervisor.state == Phase.FAILED.value,
        )

    def _end_with_worker(self) -> None:
        for task in self._with_worker:
            task.cancel()
