"""A board's process in a farm: Dask's worker around one `Board`."""

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
from distributed import Status, Worker

from .board import PLACE, Board
from .scheduler import NOWHERE, SETTINGS, quiet, stopping
from .security import checked, security

_REST_SECONDS = 5.0  # without being asked, after which the device is left to others
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 5.0  # while no scheduler answers


def serve(url: str, certificates: Path | None, board: Board, tell: Callable[[str], None]) -> None:
    """Have `board` judge what the farm at `url` asks for, until SIGINT or SIGTERM; closes it then.

    Where the scheduler goes away, it is waited for. Raises what `checked` and `security` raise.
    """
    url = checked(url)
    guard = security(url, certificates)
    pool = _Lasting(board.threads, "board")
    PLACE.board = board

    async def stay() -> None:
        stop, told = stopping(), False
        while not stop.is_set():
            with tempfile.TemporaryDirectory(prefix="honed-farm-") as folder:
                worker = Worker(
                    url,
                    nthreads=board.threads,
                    executor=pool,
                    name=f"{socket.gethostname()}-{os.getpid()}",
                    security=guard,
                    local_directory=folder,
                    memory_limit=0,
                    dashboard=False,
                    dashboard_address=NOWHERE,
                    death_timeout=_RETRY_SECONDS,
                )
                try:
                    await worker
                except (TimeoutError, OSError, RuntimeError, ValueError) as error:
                    await worker.close(nanny=False)
                    if not told:
                        tell(f"no farm answers at {url} ({error}); it is waited for")
                        told = True
                else:
                    tell(f"in the farm at {url} as {worker.name}")
                    told = False
                    await _until_left(worker, stop)
                    await worker.close(nanny=False)
            await _either(stop, _RETRY_SECONDS)

    async def _until_left(worker: Worker, stop: asyncio.Event) -> None:
        resting = False
        while worker.status in (Status.running, Status.paused):
            if await _either(stop, _LOOK_SECONDS):
                PLACE.leaving = True  # what is being judged is finished, what waits goes back
                await asyncio.get_running_loop().run_in_executor(pool, _nothing)
                return
            quiet_for = time.monotonic() - PLACE.asked
            if quiet_for > _REST_SECONDS and not resting:
                await asyncio.get_running_loop().run_in_executor(pool, board.rest)
            resting = quiet_for > _REST_SECONDS

    quiet()
    try:
        with dask.config.set(SETTINGS):
            asyncio.run(stay())
    finally:
        PLACE.board = None
        pool.submit(board.close).result()
        pool.end()


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
