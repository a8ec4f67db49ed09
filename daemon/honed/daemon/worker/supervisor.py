"""Keeps a process that runs models alive, and makes calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.daemon.aio import DeadlineWatch
from honed.daemon.core.messages import WorkerLost, WorkerReady
from honed.daemon.settings.schema import Limits
from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.process import aio
from honed.process.aio import Child, RestartPolicy
from honed.process.children import ResourceLimits, kill_group, python
from honed.process.rpc import R
from honed.protocol import strict
from honed.protocol.aiolink import AsyncLink, OnAnswer
from honed.protocol.errors import HonedError, Unavailable
from honed.protocol.peer import ResponseReceived
from honed.protocol.service import WorkerEnd
from honed.protocol.wire import APART, FrameLimits
from honed.runtime.engines import UNLIMITED, PartLimits

from .calls import FindDevice, MapRegion, OpenDevice, Ping, WorkerCall
from .shared_memory import HeldRegion

# Answers hold the outputs of an inference, whose size is limited before it runs (`serving/plan.py`).
FRAMES = FrameLimits(max_bytes=1 << 30, max_depth=512, max_values=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgram:
    """The program of a worker: a module with a `Host`, its arguments and limits.

    The command line has `argument`, `more`, and `bound`, by which errors describe the limit of memory;
    `setting` names that limit. `niceness` is a minimum. `building_mib` is the memory of the builder, if that
    is more: a driver's compiler needs more memory than the kernels it builds.
    """

    module: str
    argument: str
    memory_mib: int
    setting: str
    more: tuple[str, ...] = ()
    niceness: int = 0
    building_mib: int = 0

    @property
    def building(self) -> WorkerProgram:
        """The program of the builder for this worker."""
        if not 0 < self.memory_mib < self.building_mib:
            return self
        setting = "limits.compile_memory_mib"
        return dataclasses.replace(self, memory_mib=self.building_mib, setting=setting)

    @property
    def bound(self) -> str:
        """The limit of memory and its setting, for errors; "" for no limit."""
        return f"{self.memory_mib} MiB of {self.setting}" if self.memory_mib else ""


def device_program(
    spec: str, memory_mib: int, parts: PartLimits = UNLIMITED, building_mib: int = 0
) -> WorkerProgram:
    """Return the program of an OpenCL device's worker; `parts` limits the process of its CPU partitions."""
    more = (str(parts.threads), str(parts.memory_mib))
    return WorkerProgram(
        module="honed.daemon.worker.worker",
        argument=spec,
        memory_mib=memory_mib,
        setting="limits.worker_memory_mib",
        more=more,
        building_mib=building_mib,
    )


async def spawn(
    program: WorkerProgram, cache_dir: Path, lost: Callable[[], HonedError], *, niceness: int = 0
) -> tuple[Child, AsyncLink]:
    """Start a worker; `lost` creates the error of interrupted calls. Raises OSError."""
    command = python(program.module, str(cache_dir), program.argument, *program.more, program.bound)
    bounds = ResourceLimits(memory_mib=program.memory_mib, niceness=max(niceness, program.niceness))
    return await aio.spawn_rpc(command, bounds, lost=lost, frames=FRAMES, large=APART)


# ---- Supervision of a serving worker: starts it, notices its end, and restarts it ----

_REMEMBERED_ENDS = 10
_QUIET_SECONDS = 15.0  # Time without calls after which a worker is pinged
_ENDING_SECONDS = 5.0  # Time between the end of a worker's link and that of its process
_log = logging.getLogger(__name__)


class WorkerDied(Unavailable):
    """Raised when the worker crashed or was killed during a call."""


class NoWorker(WorkerDied):
    """Raised when the worker had ended before a call, or because of another one."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A call in progress, which may take `seconds` without progress."""

    call: WorkerCall[Any]
    seconds: float

    def go_on(self, deadlines: DeadlineWatch[_UnderWay]) -> None:
        """Restart the deadline of the call."""
        deadlines.set(self, time.monotonic() + self.seconds)


class Supervisor:
    """A supervisor of an engine's worker process and of the calls to it; the core has the worker's state.

    Later workers use the device that the first one found. An engine without a device has an identity and no
    profile.
    """

    def __init__(
        self,
        engine: str,
        limits: Limits,
        cache_dir: Path,
        program: WorkerProgram,
        expects_models: Callable[[], bool] = lambda: False,
    ) -> None:
        """Initialise; `expects_models` returns whether a new worker is to load models at once."""
        self._engine = engine
        self._limits = limits
        self._cache_dir = cache_dir
        self.program = program
        self._process: Child | None = None
        self._link: AsyncLink | None = None
        self._mapped: set[int] = set()  # Regions the present worker knows
        self._kill_reason = self._kill_kind = ""
        self._cause: _UnderWay | None = None  # The call for which the worker was killed
        self._calls = 0  # Calls in progress
        self._deadlines = DeadlineWatch(self._late)
        self._heard = 0.0  # Time of the worker's last answer (monotonic seconds)
        self._lost_at_work = False  # The last worker ended while it ran or built a model
        self._expects_models = expects_models
        self._reason = ""  # Reason why the last worker ended; "" once another is ready
        self.starts = 0
        self.ends: Counter[str] = Counter()  # Ends of workers by kind: hung, device, crashed, not started
        self.last_ends: deque[WorkerEnd] = deque(maxlen=_REMEMBERED_ENDS)
        self._from_outside = False  # The last worker was killed by another program, or because memory ran out
        self.identity: DeviceIdentity | None = None
        self.profile: DeviceProfile | None = None

    @property
    def reachable(self) -> bool:
        """Return whether there is a worker whose link is not known to be broken."""
        return self._link is not None and self._link.broken is None

    @property
    def pid(self) -> int:
        """The id of the worker's process; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    async def run(self, tell: Callable[[WorkerReady | WorkerLost], None]) -> None:
        """Keep a worker running until cancelled, then end it.

        Passes to `tell` each start of a worker, which has no models, and each end, once the interrupted calls
        have failed.
        """
        restarts = RestartPolicy()
        while True:
            begun, ready = time.monotonic(), False
            try:
                process, event = await self._start()
            except (OSError, HonedError) as error:
                self._record_end("not started", await self._start_failure(error))
            else:
                ready = True
                tell(event)
                await self._watch(process)
            finally:
                await self._end()
            lived = time.monotonic() - begun
            # Interrupted calls fail before the core receives the end: the end of the process may be noticed
            # before that of its socket.
            while self._calls:
                await asyncio.sleep(0)
            delay = restarts.delay_after(lived=lived, ready=ready, at_work=self._lost_at_work)
            # Requests wait for the successor of a worker that was ready. If two in a row did not start, the
            # engine has failed, and requests are refused.
            tell(
                WorkerLost(
                    engine=self._engine,
                    reason=self._reason,
                    from_outside=self._from_outside,
                    failed=restarts.failing,
                )
            )
            await asyncio.sleep(delay)

    async def call(self, call: WorkerCall[R], descriptors: Sequence[int] = (), *, seconds: float) -> R:
        """Make a call and return the worker's answer.

        Raises the worker's HonedError, or WorkerDied if it crashed or took longer than `seconds`, which start
        again with each progress report.
        """
        link, under_way = self._require_link(), _UnderWay(call, seconds)
        coming = aio.begin(link, call, descriptors, lambda _: under_way.go_on(self._deadlines))
        self._count(under_way)
        coming.add_done_callback(
            lambda done: self._over(under_way, None if done.cancelled() else done.exception())
        )
        try:
            return call.decode(await coming)
        except WorkerDied as died:
            raise self._death_error(under_way, died) from died

    def ask(self, call: WorkerCall[Any], on_answer: OnAnswer, *, seconds: float) -> int:
        """Make a call, and return its number; `on_answer` is called with its answer or error.

        The error is NoWorker if the worker was killed because of another call. Raises NoWorker if there is no
        worker.
        """
        link, under_way = self._require_link(), _UnderWay(call, seconds)

        def on_response(answer: ResponseReceived | Exception) -> None:
            self._over(under_way, answer if isinstance(answer, Exception) else None)
            on_answer(self._death_error(under_way, answer) if isinstance(answer, WorkerDied) else answer)

        self._count(under_way)
        try:
            return link.ask(call.method, strict.to_plain(call), on_response)
        except BaseException:
            self._calls -= 1
            self._deadlines.drop(under_way)
            raise

    def end_call(self, number: int) -> None:
        """Have the worker end an abandoned call, which it still answers."""
        if self._link is not None and self._link.broken is None:
            self._link.notify("Cancel", {"msgid": number})

    def _death_error(self, call: _UnderWay, error: WorkerDied) -> WorkerDied:
        """Return the error of a call whose worker ended: NoWorker if another call was the cause."""
        return error if self._cause in (None, call) else NoWorker(str(error))

    def _require_link(self) -> AsyncLink:
        """Return the worker's link; raise NoWorker if there is no worker."""
        if self._link is None:
            raise NoWorker(f"there is no worker ({self._reason or 'it is starting'}); try again")
        if self._link.broken is not None:
            raise NoWorker(str(self._link.broken))
        return self._link

    def _count(self, call: _UnderWay) -> None:
        """Count a call as in progress, and start its deadline."""
        self._calls += 1
        call.go_on(self._deadlines)

    def _over(self, call: _UnderWay, error: BaseException | None) -> None:
        """Count a call as ended, answered or with `error`."""
        self._calls -= 1
        self._deadlines.drop(call)
        if error is None:
            self._heard = time.monotonic()
        elif isinstance(error, WorkerDied):
            self._lost_at_work |= call.call.work

    def _late(self, call: _UnderWay) -> None:
        self._cause = self._cause or call
        self.kill(f"it did not finish within {call.seconds:g} s", kind="hung")

    def kill(self, reason: str, *, kind: str = "device") -> None:
        """Kill the worker; `run` starts another."""
        self._kill_reason, self._kill_kind = self._kill_reason or reason, self._kill_kind or kind
        if self._process is not None and self._process.running:
            _log.warning("killing the worker %d: %s", self._process.pid, reason)
            kill_group(self._process.pid)
        if self._link is not None:
            self._link.fail(self._loss_error())

    async def open(self) -> None:
        """Have the worker load the device's driver, which it does not need before the first model.

        Raises WorkerDied if the device is gone or the driver has changed; the next worker finds the device.
        """
        try:
            await self.call(OpenDevice(), seconds=self._limits.load_seconds)
        except WorkerDied:
            raise
        except HonedError as error:
            self.kill(str(error))
            raise self._loss_error() from error

    async def map(self, region: HeldRegion, seconds: float) -> None:
        """Have the worker map a region, unless it has; raise as `call`."""
        if not self.knows(region):
            call = MapRegion(region=region.number, offset=region.offset, byte_size=region.byte_size)
            await self.call(call, [region.descriptor], seconds=seconds)
            self._mapped.add(region.number)

    def knows(self, region: HeldRegion) -> bool:
        """Return whether the present worker has mapped a region."""
        return region.number in self._mapped

    def forget(self, region: int) -> bool:
        """Forget a region that is gone; return whether the worker must unmap it."""
        known = region in self._mapped
        self._mapped.discard(region)
        return known and self._link is not None

    def _loss_error(self) -> WorkerDied:
        return WorkerDied(f"the worker process ended ({self._kill_reason or 'it crashed'}); try again")

    async def _start(self) -> tuple[Child, WorkerReady]:
        """Start a worker, and return it with its event when it is ready; raise if it does not start."""
        self.starts += 1
        self._kill_reason = self._kill_kind = ""
        self._cause = None
        self._lost_at_work = self._from_outside = False
        process, link = await spawn(self.program, self._cache_dir, self._loss_error)
        self._process, self._link = process, link
        seconds = self._limits.load_seconds
        # Half of the time is for peaks: a device too slow to measure them must still be ready in time.
        find = FindDevice(models=self._expects_models(), measure_seconds=seconds / 2)
        found = await self.call(find, seconds=seconds)
        if found.profile is not None:
            found.profile.check()
            self.profile = found.profile
            self.program = dataclasses.replace(self.program, argument=found.spec)
        self.identity, self._reason = found.identity, ""
        _log.info("worker %d is ready on %s", process.pid, found.spec)
        return process, WorkerReady(
            engine=self._engine,
            worker=self.starts,
            spec=found.spec,
            family=self.profile.rules.family if self.profile is not None else "",
            fingerprint=" / ".join(dataclasses.astuple(found.identity)),
        )

    async def _start_failure(self, error: OSError | HonedError) -> str:
        """Return why a worker did not start: how it ended, if it died by itself."""
        if isinstance(error, WorkerDied) and not self._kill_reason and self._process is not None:
            with contextlib.suppress(TimeoutError):  # Only its link broke
                async with asyncio.timeout(_ENDING_SECONDS):
                    return str(await self._process.wait())
        return self._kill_reason or str(error)

    async def _watch(self, process: Child) -> None:
        """Wait for the end of a worker that was ready."""
        asking = asyncio.ensure_future(self._ask_now_and_then())
        try:
            death = await process.wait()
        finally:
            asking.cancel()
        self._from_outside = not self._kill_reason and death.from_outside
        self._record_end(self._kill_kind or "crashed", self._kill_reason or str(death))

    async def _ask_now_and_then(self) -> None:
        """Ping the worker while there are no calls, so that a hung one is noticed, until it has ended."""
        pause = min(_QUIET_SECONDS, self._limits.run_seconds)
        with contextlib.suppress(WorkerDied):
            while True:
                await asyncio.sleep(pause)
                if not self._calls and time.monotonic() - self._heard >= pause:
                    await self.call(Ping(), seconds=self._limits.run_seconds)

    def _record_end(self, kind: str, reason: str) -> None:
        self.ends[kind] += 1
        self.last_ends.append(WorkerEnd(time=time.time(), pid=self.pid, kind=kind, reason=reason))
        # A repeated reason is logged as an error once.
        _log.log(logging.ERROR if reason != self._reason else logging.DEBUG, "the worker ended: %s", reason)
        self._reason = reason

    async def _end(self) -> None:
        self._mapped.clear()
        if self._link is not None:
            self._link.fail(self._loss_error())
            self._link = None
        if self._process is not None:
            await self._process.end()
            self._process = None
