"""Requests on their way: what each client waits for, and its runs on the workers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic

from honed.daemon.core.actions import Run
from honed.daemon.core.events import Broken, Event, Served, Unfit
from honed.daemon.core.states import ServedModel
from honed.daemon.deadlines import DeadlineWatch
from honed.daemon.settings.limits import Limits
from honed.daemon.worker.calls import R, WorkerCall, taken
from honed.daemon.worker.regions import HeldRegion
from honed.daemon.worker.supervisor import WorkerDied
from honed.protocol import strict
from honed.protocol.errors import (
    DeadlineExceeded,
    DeviceError,
    HonedError,
)
from honed.protocol.peer import ResponseReceived

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


class Dispatcher:
    """The requests that are not answered yet, by number."""

    def __init__(self, limits: Limits, servers: Mapping[str, DeviceServer]) -> None:
        self._limits = limits
        self._servers = servers
        self._work: dict[int, PendingRequest[Any]] = {}
        self._deadlines = DeadlineWatch(self._late)
        self._numbers = itertools.count(1)

    @contextmanager
    def taken(self, work: PendingRequest[Any], deadline: float) -> Iterator[int]:
        """While somebody waits for a request; gives its number.

        When the deadline, in monotonic seconds, has passed it is refused with DeadlineExceeded.
        """
        number = next(self._numbers)
        self._work[number] = work
        self._deadlines.set(number, deadline)
        for region in work.regions:
            region.hold()
        try:
            yield number
        finally:
            del self._work[number]
            self._deadlines.drop(number)
            self._release(work)

    def _late(self, number: int) -> None:
        where = "while it ran" if self._work[number].started else "before its turn came"
        self.refuse(number, DeadlineExceeded(f"the request's deadline passed {where}; allow more time"))

    def run(self, action: Run, told: Callable[[Event], None]) -> Coroutine[Any, Any, None] | None:
        """Run on a worker, and tell what came of it; gives what a task must do for that, if anything.

        It keeps what it needs although nobody may wait for it any more.
        """
        work, supervisor = self._work[action.ticket.number], self._servers[action.engine].supervisor
        for region in work.regions:
            region.hold()
        if all(map(supervisor.knows, work.regions)):
            self._begin(action, work, told)
            return None
        return self._mapped(action, work, told)

    async def _mapped(self, action: Run, work: PendingRequest[Any], told: Callable[[Event], None]) -> None:
        try:
            for region in work.regions:
                supervisor = self._servers[action.engine].supervisor
                await supervisor.map(region, self._limits.run_seconds)
        except HonedError as error:
            self._release(work)
            told(_failed(action.engine, error))
        else:
            self._begin(action, work, told)

    def _begin(self, action: Run, work: PendingRequest[Any], told: Callable[[Event], None]) -> None:
        work.started = time.monotonic()
        work.model, work.version = action.model, action.model.manifest.history.number
        work.engine = action.engine
        call = work.call(action.model.key_on(action.engine))
        supervisor = self._servers[action.engine].supervisor
        try:
            coming = supervisor.begin(call, seconds=self._limits.run_seconds)
        except HonedError as error:
            self._release(work)
            told(_failed(action.engine, error))
        else:
            coming.add_done_callback(partial(self._ran, action.engine, work, call, told))

    def _ran(
        self,
        engine: str,
        work: PendingRequest[Any],
        call: WorkerCall[Any],
        told: Callable[[Event], None],
        coming: asyncio.Future[ResponseReceived],
    ) -> None:
        self._release(work)
        try:
            work.answers.append(taken(call, coming.result()))
        except HonedError as error:
            told(_failed(engine, error))
        except strict.Mismatch as error:
            told(Broken(engine, f"the worker's answer makes no sense: {error}", device=False))
        else:
            told(Served(engine, more=len(work.answers) < work.runs))

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

    def _release(self, work: PendingRequest[Any]) -> None:
        for region in work.regions:
            self.release(region)


def _failed(engine: str, error: HonedError) -> Event:
    if isinstance(error, WorkerDied | DeviceError):
        return Broken(engine, str(error), device=isinstance(error, DeviceError))
    return Unfit(engine, error.with_traceback(None))  # which keeps the frame it was caught in, with the data
