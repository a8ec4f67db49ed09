"""A board's process in a farm: Dask's worker around one `FarmBoard`."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
from distributed import Security, Status, Worker

from .board import PLACE, FarmBoard
from .scheduler import NOWHERE, SETTINGS, checked, quiet, security, stopping

_REST_SECONDS = 5.0  # without being asked, after which the device is left to others
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 5.0  # while no scheduler answers


def serve(url: str, certificates: Path | None, board: FarmBoard, tell: Callable[[str], None]) -> None:
    """Have `board` judge what the farm at `url` asks for, until SIGINT or SIGTERM; closes it then.

    Where the scheduler goes away, it is waited for. Raises what `checked` and `security` raise.
    """
    url = checked(url)
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
    """The worker that a board has in the farm; another, once that has lost its scheduler."""

    def __init__(self, url: str, guard: Security, board: FarmBoard, tell: Callable[[str], None]) -> None:
        self._url = url
        self._guard = guard
        self._board = board
        self._tell = tell
        self._pool = _Lasting(board.threads, "board")

    async def stay(self) -> None:
        """Be in the farm until told to stop."""
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
        """End the board's processes, and its threads."""
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
        """Until told to stop, or the scheduler is gone; the board rests while nothing is asked of it."""
        loop, resting = asyncio.get_running_loop(), False
        while worker.status in (Status.running, Status.paused):
            if await _either(stop, _LOOK_SECONDS):
                PLACE.leaving = True  # what is being judged is finished, what waits goes back
                await loop.run_in_executor(self._pool, _nothing)
                return
            unasked = time.monotonic() - PLACE.asked > _REST_SECONDS
            if unasked and not resting:
                await loop.run_in_executor(self._pool, self._board.rest)
            resting = unasked


class _Lasting(ThreadPoolExecutor):
    """Threads that outlast the workers that use them: a measuring child dies with the one that started it."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing, as Dask calls it when a worker closes."""

    def end(self) -> None:
        """End the threads."""
        super().shutdown()


async def _either(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for that time, or until told to stop; whether it was."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _nothing() -> None:
    """Done when all that was being judged before is."""
