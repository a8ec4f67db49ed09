"""Builds and verifies compiled files in a process of its own, so that a crash does not affect served models.

The serving worker loads the built kernels from the driver's cache. The builder is a worker like the serving
one, on the same device; it ends after a time without work.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.settings.schema import Limits
from honed.process import aio
from honed.process.aio import Child
from honed.process.limits import no_memory
from honed.process.rpc import R
from honed.protocol.aiolink import AsyncLink
from honed.protocol.strict import Map

from .calls import BuildModel, CheckProbe, FindDevice, OpenDevice, UnloadModel, WorkerCall
from .supervisor import Supervisor, WorkerDied, spawn

_KEPT_SECONDS = 20.0  # Time without work after which the process ends
_NICENESS = 15  # Niceness of background builds
_REMEMBERED = 10
_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


class BuilderLost(WorkerDied):
    """Raised when the builder crashed or hung, which does not affect served models."""


@dataclass(slots=True)
class _Running:
    process: Child
    link: AsyncLink
    niceness: int


class BuildProcess:
    """A builder for a device, which builds one file at a time."""

    def __init__(self, limits: Limits, cache_dir: Path, supervisor: Supervisor) -> None:
        """Initialise; `supervisor` keeps the serving worker of the device."""
        self._limits = limits
        self._cache_dir = cache_dir
        self._supervisor = supervisor
        self._running: _Running | None = None
        self._busy = asyncio.Lock()
        self._rest: asyncio.TimerHandle | None = None
        self._resting: asyncio.Task[None] | None = None
        self._why = ""  # Reason why the service ended the process
        self.pids: deque[int] = deque(maxlen=_REMEMBERED)  # Ids of the latest processes

    async def prove(
        self, key: str, path: str, *, foreground: bool = True, progress: Progress = lambda _, __: None
    ) -> None:
        """Build a file's kernels, and verify its outputs for all probes.

        `progress` receives the numbers of kernels built and of all. With `foreground` a client waits. Each
        kernel may take `load_seconds`, and each probe `run_seconds`. Raises ModelRefused if an output is
        wrong, DeviceError if the device cannot build or hold the model, and BuilderLost.
        """
        async with self._busy:
            self._stop_resting()
            running = await self._start(0 if foreground else _NICENESS)
            try:
                built = await self._call(running, BuildModel(key=key, path=path), progress)
                for probe in range(built.probes):
                    checked = await self._call(running, CheckProbe(key=key, probe=probe))
                    if checked.device_error:
                        raise BuilderLost(f"the device failed: {checked.device_error}")
                await self._call(running, UnloadModel(key=key))
            except (WorkerDied, asyncio.CancelledError):
                await self._end()
                raise
            except BaseException:
                await self._call(running, UnloadModel(key=key))
                raise
            finally:
                if self._running is not None:
                    self._rest = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._stop_unused)

    async def kill(self) -> None:
        """End the process, even during a build."""
        self._stop_resting()
        await self._end()

    async def _start(self, niceness: int) -> _Running:
        running = self._running
        if running is not None and (running.niceness != niceness or not running.link.usable()):
            await self._end()
        if self._running is None:
            self._why = ""
            try:
                process, link = await spawn(
                    self._supervisor.program.building, self._cache_dir, self._loss_error, niceness=niceness
                )
            except OSError as error:
                raise BuilderLost(f"a process to build in cannot be started: {error}") from error
            self._running = _Running(process, link, niceness)
            self.pids.append(process.pid)
            await self._call(self._running, FindDevice(models=True, measure_seconds=None))
            await self._call(self._running, OpenDevice())
        return self._running

    async def _call(
        self,
        running: _Running,
        call: WorkerCall[R],
        progress: Progress = lambda _, __: None,
    ) -> R:
        """Return the answer of the process; the time limit starts again whenever it reports progress."""
        seconds = self._limits.run_seconds if isinstance(call, CheckProbe) else self._limits.load_seconds
        try:
            async with asyncio.timeout(seconds) as deadline:

                def report(params: Map) -> None:
                    deadline.reschedule(asyncio.get_running_loop().time() + seconds)
                    progress(int(params["done"]), int(params["of"]))

                return call.decode(await aio.begin(running.link, call, progress=report))
        except TimeoutError as error:
            self._why = f"{call.method} took longer than {seconds:g} s"
            raise self._loss_error() from error
        except BuilderLost as error:
            if self._why:
                raise
            death = await running.process.wait()
            reason = f"the process that builds ended: {death}"
            bound, device = self._supervisor.program.building.bound, self._supervisor.profile is not None
            if death.out_of_memory and bound:
                reason = no_memory(reason, "", bound)
            elif bound and device and death.signal is not None:  # Drivers crash, too, if they get no memory
                reason = f"{reason}; it may have needed more than {bound}"
            raise BuilderLost(reason) from error

    def _loss_error(self) -> BuilderLost:
        return BuilderLost(f"the process that builds ended ({self._why or 'it crashed'})")

    async def _end(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        self._why = self._why or "it was not needed any more"
        running.link.fail(self._loss_error())
        await running.process.end()

    def _stop_resting(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _stop_unused(self) -> None:
        async def end() -> None:
            async with self._busy:
                await self._end()

        self._rest = None
        self._resting = asyncio.ensure_future(end())
