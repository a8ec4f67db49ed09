"""Requests on their way: what each client waits for, and its runs on the workers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

from honed.daemon.core.actions import Run
from honed.daemon.core.events import Broken, Event, Served, Unfit
from honed.daemon.core.states import ServedModel
from honed.daemon.settings.limits import Limits
from honed.daemon.worker.calls import R, WorkerCall
from honed.daemon.worker.regions import HeldRegion
from honed.daemon.worker.supervisor import WorkerDied
from honed.protocol.errors import (
    DeadlineExceeded,
    DeviceError,
    HonedError,
)

from .deviceserver import DeviceServer


@dataclass(slots=True, kw_only=True)
class PendingRequest(Generic[R]):
    """What a request has workers do, and what came of it so far.

    `call` is for the key the model has when it runs; each of the `runs` is a turn of its own.
    """

    call: Callable[[str], WorkerCall[R]]
    regions: list[HeldRegion]
    runs: int = 1
    answers: list[R] = field(default_factory=list)
    started: float = 0.0
    model: ServedModel | None = None  # that ran it last
    version: int = 0  # of that
    engine: str = ""  # that ran it last
    open: bool = False  # in shapes that only the CPU engine takes
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def wait(self, deadline: float) -> None:
        """Return once it was answered; raises what it was refused with, or DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self.done
        except TimeoutError as error:
            where = "while it ran" if self.started else "before its turn came"
            raise DeadlineExceeded(f"the request's deadline passed {where}; allow more time") from error


class Dispatcher:
    """The requests that are not answered yet, by number."""

    def __init__(self, limits: Limits, servers: Mapping[str, DeviceServer]) -> None:
        self._limits = limits
        self._servers = servers
        self._work: dict[int, PendingRequest[Any]] = {}
        self._numbers = itertools.count(1)

    @contextmanager
    def taken(self, work: PendingRequest[Any]) -> Iterator[int]:
        """While somebody waits for a request; gives its number."""
        number = next(self._numbers)
        self._work[number] = work
        for region in work.regions:
            region.hold()
        try:
            yield number
        finally:
            del self._work[number]
            self._release(work)

    def run(self, action: Run) -> Coroutine[Any, Any, Event]:
        """A run, which keeps what it needs although nobody may wait for it any more; what came of it."""
        work = self._work[action.ticket.number]
        for region in work.regions:
            region.hold()
        return self._run(action, work)

    def answer(self, request: int) -> None:
        """Give a request what its runs brought."""
        done = self._work[request].done
        if not done.done():
            done.set_result(None)

    def refuse(self, request: int, error: HonedError) -> None:
        """Tell a request why it is not served."""
        done = self._work[request].done
        if not done.done():
            done.set_exception(error)

    def release(self, region: HeldRegion) -> None:
        """Let go of a region; with its last holder gone the workers unmap it."""
        if region.release():
            for server in self._servers.values():
                server.drop_region(region.number)

    async def answered(self, seconds: float) -> None:
        """Return once every request was answered, or after so long."""
        end = time.monotonic() + seconds
        while self._work and time.monotonic() < end:
            waiting = [work.done for work in self._work.values()]
            await asyncio.wait(waiting, timeout=end - time.monotonic())
            await asyncio.sleep(0)  # let those who waited for the answers take them

    async def taken_all(self) -> None:
        """Return once those who waited have taken their answers."""
        while self._work:
            await asyncio.sleep(0)

    async def _run(self, action: Run, work: PendingRequest[Any]) -> Event:
        engine = action.engine
        try:
            work.answers.append(await self._on_worker(action, work))
        except (WorkerDied, DeviceError) as error:
            return Broken(engine, str(error), device=isinstance(error, DeviceError))
        except HonedError as error:
            return Unfit(engine, error)
        finally:
            self._release(work)
        return Served(engine, more=len(work.answers) < work.runs)

    async def _on_worker(self, action: Run, work: PendingRequest[R]) -> R:
        supervisor, seconds = self._servers[action.engine].supervisor, self._limits.run_seconds
        work.started = time.monotonic()
        work.model, work.version = action.model, action.model.manifest.history.number
        work.engine = action.engine
        for region in work.regions:
            await supervisor.map(region, seconds)
        return await supervisor.call(work.call(action.model.key_on(action.engine)), seconds=seconds)

    def _release(self, work: PendingRequest[Any]) -> None:
        for region in work.regions:
            self.release(region)
