"""Makes this machine a board of a farm, which measures under its own lease in a Dask worker.

The machine that searches calls `greet`, `load`, `judge` and `settle` alone, with rows of plain data. They act
on the one `FarmBoard` of their process, which `serve` sets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
from distributed import Security, Status, Worker

from honed.machine.kernellog.reader import Reader
from honed.machine.peaks import Survey, survey
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import DeviceError, HonedError, InvalidArgument, Unavailable
from honed.protocol.strict import to_plain
from honed.runtime import HONED_VERSION
from honed.runtime.calling.leaseclient import LeaseHolder
from honed.tuner.measure.candidate import CANDIDATE_SECONDS, LEASED, MeasureLimits, Workload
from honed.tuner.measure.gate import Gate, LeaseGate
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import Verdict
from honed.valhall.bench import BenchMeasurer, bench_profile
from honed.valhall.compiler import OfflineCompiler

from . import rows
from .scheduler import NOWHERE, SETTINGS, check_address, quiet, security, stopping

PATIENCE_SECONDS = 5.0  # Time that a board waits for its lease before it gives a candidate back
_AWAY_SECONDS = 10.0  # Time that the board then gets no candidates
_TURN_SECONDS = 15.0  # Time without calls of one search, after which another may have the board
_BROKEN_SECONDS = 60.0  # Time that a board with a failing device gets no candidates
DEPTH = 2  # Candidates that a measuring board has: one is sent while the other is measured


class LeasedGate(Gate):
    """The lease of this machine's service, which is released while nothing is to be measured."""

    def __init__(self, socket_path: str | None) -> None:
        """Use the service at `socket_path`, None for the usual socket."""
        self._lease = LeaseHolder(CANDIDATE_SECONDS, socket=socket_path)
        self._gate: LeaseGate | None = None

    def enter(self) -> bool:
        """Wait until the device may be used; return False if the service does not grant the lease in time."""
        if self._gate is None:
            self._gate = LeaseGate(self._lease, seconds=float("inf"), patience=PATIENCE_SECONDS)
            self._gate.__enter__()
        return self._gate.enter()

    def leave(self) -> None:
        """Stop using the device until `enter` is called again."""
        if self._gate is not None:
            self._gate.leave()

    def rest(self) -> None:
        """Release the lease until `enter` is called again."""
        if self._gate is not None:
            self._gate.__exit__(None, None, None)
            self._gate = None
            self._lease.close()

    @property
    def why(self) -> str:
        """The reason that the lease is not held."""
        return self._lease.why


class MeasuringBoard:
    """An OpenCL device of this machine, for use by one thread."""

    threads = 1

    def __init__(
        self,
        device: str | None,
        cache_dir: Path,
        gate: LeasedGate | None,
        kernel_log: Callable[[], Reader | None],
    ) -> None:
        """Measure the device of the spec `device`, None for the best; without a `gate` at any time.

        Raises DeviceError if there is no device, or its peaks cannot be measured.
        """
        found: Survey = survey(device, cache_dir)
        self._profile = found.require_peaks()
        self._spec = found.spec
        self._gate = gate
        self._kernel_log = kernel_log
        self._measurer: Measurer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._workload: Workload | None = None

    def greet(self) -> rows.Greeting:
        """Return the board's greeting, with the device's profile."""
        return _greeting(self._profile, depth=DEPTH)

    def load(self, memory: rows.BoardMemory) -> rows.Answer:
        """Load a task, with the files of its inputs and answers."""
        return self._on_device(lambda: self._load(memory))

    def judge(self, trial: rows.FarmTrial) -> rows.Answer:
        """Return a verdict on a candidate of the loaded task."""
        return self._on_device(lambda: self._judge(trial))

    def settle(self) -> rows.Answer:
        """Return the faults that have come to light since, as a ruling without a verdict."""
        if self._measurer is None:
            return rows.BoardVerdict(verdict={}, phases={}, faults=())
        self._measurer.settle()
        return rows.BoardVerdict(verdict={}, phases={}, faults=rows.log_lines(self._measurer.take_faults()))

    def rest(self) -> None:
        """Release the lease until the next call."""
        if self._gate is not None:
            self._gate.rest()

    def close(self) -> None:
        """End the board's processes."""
        self.rest()
        if self._measurer is not None:
            self._measurer.close()
            self._measurer = None
        self._clear()

    def _on_device(self, do: Callable[[], rows.Answer]) -> rows.Answer:
        """Call `do` under the lease; return BoardBusy if it is not granted, or the device fails."""
        try:
            if self._gate is not None and not self._gate.enter():
                return rows.BoardBusy(why=f"it is in use: {self._gate.why}", seconds=_AWAY_SECONDS)
            return do()
        except (DeviceError, Unavailable) as error:
            return rows.BoardBusy(why=str(error), seconds=_BROKEN_SECONDS)
        finally:
            if self._gate is not None:
                self._gate.leave()

    def _load(self, memory: rows.BoardMemory) -> rows.Answer:
        self._workload = None
        self._clear()
        self._folder = tempfile.TemporaryDirectory(prefix="honed-farm-")
        workload = rows.workload_in(Path(self._folder.name), memory)
        if self._measurer is None:
            limits = MeasureLimits() if self._gate is None else LEASED
            self._measurer = Measurer(self._spec, self._profile, limits, kernel_log=self._kernel_log())
        self._measurer.load(workload)
        self._workload = workload
        return rows.BoardReady(rate=self._measurer.rate)

    def _judge(self, trial: rows.FarmTrial) -> rows.Answer:
        if self._measurer is None or self._workload is None or self._workload.task != trial.task:
            return rows.BoardBusy(
                why=f"it has not loaded the task {trial.task[:16]}", seconds=0.0, reload=True
            )
        verdict = self._measurer.measure(rows.candidate_of(trial), trial.best)
        return _ruling(verdict, self._measurer.spent, rows.log_lines(self._measurer.take_faults()))

    def _clear(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class BenchBoard:
    """The bench of a device that is not here, on all cores of this machine."""

    def __init__(self, bench: str, compiler: OfflineCompiler, threads: int) -> None:
        """Own `compiler`, which makes `threads` programs at a time."""
        self.threads = threads
        self._bench = bench
        self._profile = bench_profile(bench)
        self._compiler = compiler
        self._lock = threading.Lock()  # Guards the workload
        self._workload: Workload | None = None

    def greet(self) -> rows.Greeting:
        """Return the board's greeting, with the predicted device's profile."""
        return _greeting(self._profile, depth=DEPTH * self.threads, bench=self._bench)

    def load(self, memory: rows.BoardMemory) -> rows.Answer:
        """Load a task; its files are not written, as nothing runs."""
        workload = rows.workload_in(Path(os.devnull), memory)
        with self._lock:
            self._workload = workload
        return rows.BoardReady(rate=0.0)

    def judge(self, trial: rows.FarmTrial) -> rows.Answer:
        """Return a verdict on a candidate of the loaded task, from its machine code."""
        with self._lock:
            workload = self._workload
        if workload is None or workload.task != trial.task:
            return rows.BoardBusy(
                why=f"it has not loaded the task {trial.task[:16]}", seconds=0.0, reload=True
            )
        judging = BenchMeasurer(self._compiler, self._profile, lambda _: None)
        judging.load(workload)
        try:
            return _ruling(judging.measure(rows.candidate_of(trial)), judging.spent, ())
        except DeviceError as error:
            return rows.BoardBusy(why=str(error), seconds=_BROKEN_SECONDS)

    def settle(self) -> rows.Answer:
        """Return a ruling without faults: nothing runs, so nothing can fault."""
        return rows.BoardVerdict(verdict={}, phases={}, faults=())

    def rest(self) -> None:
        """Do nothing, as there is no lease."""

    def close(self) -> None:
        """End the offline compiler's processes."""
        self._compiler.close()


FarmBoard = MeasuringBoard | BenchBoard  # Judges candidates in a worker, `threads` of them at a time


def _ruling(
    verdict: Verdict, phases: dict[str, float], faults: tuple[rows.LogLine, ...]
) -> rows.BoardVerdict:  # fmt: skip
    return rows.BoardVerdict(verdict=to_plain(verdict), phases=dict(phases), faults=faults)


class BoardPlace:
    """The board of a process and the search that has it: searches take turns, as a board loads one task."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.board: FarmBoard | None = None
        self.leaving = False
        self.asked = clock()  # Time of the last call
        self._search = ""
        self._clock = clock

    def answer(self, search: str, do: Callable[[FarmBoard], rows.Answer]) -> bytes:
        """Return the board's packed answer to a search, or with `search` "" to the one that has the board."""
        board, now = self.board, self._clock()
        if board is None or self.leaving:
            return rows.pack(rows.BoardBusy(why="it is leaving the farm", seconds=_BROKEN_SECONDS))
        if search not in ("", self._search) and self._search and now - self.asked < _TURN_SECONDS:
            return rows.pack(rows.BoardBusy(why="another search has it", seconds=_AWAY_SECONDS, reload=True))
        self._search = search or self._search
        self.asked = now
        try:
            return rows.pack(do(board))
        except InvalidArgument as error:
            return rows.pack(rows.BoardBusy(why=str(error), seconds=_BROKEN_SECONDS))
        except HonedError as error:
            return rows.pack(rows.BoardBusy(why=str(error), seconds=_AWAY_SECONDS))
        finally:
            self.asked = self._clock()


PLACE = BoardPlace()


def greet() -> bytes:
    """Return the board's packed `Greeting`, empty if the process is no board."""
    return b"" if PLACE.board is None else rows.pack(PLACE.board.greet())


def load(memory: bytes) -> bytes:
    """Load a packed `BoardMemory`, and return a packed answer."""
    row = rows.unpack(rows.BoardMemory, memory)
    return PLACE.answer(row.search, lambda board: board.load(row))


def judge(trial: bytes) -> bytes:
    """Judge a packed `FarmTrial`, and return a packed answer."""
    row = rows.unpack(rows.FarmTrial, trial)
    return PLACE.answer(row.search, lambda board: board.judge(row))


def settle() -> bytes:
    """Settle the board, and return its packed answer."""
    return PLACE.answer("", lambda board: board.settle())


def _greeting(profile: DeviceProfile, *, depth: int, bench: str = "") -> rows.Greeting:
    return rows.Greeting(
        version=rows.VERSION,
        honed=HONED_VERSION,
        host=socket.gethostname(),
        bench=bench,
        depth=depth,
        profile=profile.to_dict(),
    )


_REST_SECONDS = 5.0  # Time without calls after which the device is released
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 5.0  # Time between tries while no scheduler answers


def serve(url: str, certificates: Path | None, board: FarmBoard, tell: Callable[[str], None]) -> None:
    """Judge with `board` what the farm at `url` requests, until SIGINT or SIGTERM; then close it.

    If the scheduler disappears, wait for it. Raises what `check_address` and `security` raise.
    """
    url = check_address(url)
    member = _Member(url, security(url, certificates), board, tell)
    PLACE.board = board
    quiet()
    try:
        with dask.config.set(SETTINGS):
            asyncio.run(member.stay())
    finally:
        PLACE.board = None
        member.close()


class _Member:
    """The Dask worker of a board; a new one once the scheduler was lost."""

    def __init__(self, url: str, guard: Security, board: FarmBoard, tell: Callable[[str], None]) -> None:
        self._url = url
        self._guard = guard
        self._board = board
        self._tell = tell
        self._pool = _Lasting(board.threads, "board")

    async def stay(self) -> None:
        """Stay in the farm until SIGINT or SIGTERM."""
        stop, waited = stopping(), False
        while not stop.is_set():
            with tempfile.TemporaryDirectory(prefix="honed-farm-") as folder:
                worker = self._worker(folder)
                try:
                    await worker
                except (TimeoutError, OSError, RuntimeError, ValueError) as error:
                    if not waited:
                        self._tell(f"no farm answers at {self._url} ({error}); it is waited for")
                    waited = True
                else:
                    self._tell(f"in the farm at {self._url} as {worker.name}")
                    waited = False
                    await self._until_left(worker, stop)
                await worker.close(nanny=False)
            await _either(stop, _RETRY_SECONDS)

    def close(self) -> None:
        self._pool.submit(self._board.close).result()
        self._pool.end()

    def _worker(self, folder: str) -> Worker:
        return Worker(
            self._url,
            nthreads=self._board.threads,
            executor=self._pool,
            name=f"{socket.gethostname()}-{os.getpid()}",
            security=self._guard,
            local_directory=folder,
            memory_limit=0,
            dashboard=False,
            dashboard_address=NOWHERE,
            death_timeout=_RETRY_SECONDS,
        )

    async def _until_left(self, worker: Worker, stop: asyncio.Event) -> None:
        """Wait for SIGINT, SIGTERM or the loss of the scheduler; the board rests without requests."""
        loop, resting = asyncio.get_running_loop(), False
        while worker.status in (Status.running, Status.paused):
            if await _either(stop, _LOOK_SECONDS):
                PLACE.leaving = True  # The candidate being judged is finished, waiting ones go back
                await loop.run_in_executor(self._pool, lambda: None)
                return
            unasked = time.monotonic() - PLACE.asked > _REST_SECONDS
            if unasked and not resting:
                await loop.run_in_executor(self._pool, self._board.rest)
            resting = unasked


class _Lasting(ThreadPoolExecutor):
    """Threads that outlast Dask's workers: a measuring child dies with the thread that started it."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing; Dask calls this when a worker closes."""

    def end(self) -> None:
        """End all threads once their work is done."""
        super().shutdown()


async def _either(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `seconds`, or until `stop` is set; return whether it was set."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
