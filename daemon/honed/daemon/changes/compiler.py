"""Has children of the service do jobs of the compiler, `python -m honed.tuner`, within limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from honed.daemon.settings import places
from honed.jobs.commands import Job
from honed.jobs.events import News, NoEvent, R, Stage
from honed.jobs.listening import Died, Listener
from honed.machine.aiochildren import Child, spawn
from honed.machine.children import Bounds, kill_group
from honed.protocol.errors import (
    ModelRefused,
    ResourceExhausted,
    Unavailable,
)

_log = logging.getLogger(__name__)


async def compile_model(
    job: Job[R], seconds: float, progress: Callable[[Stage], None], *, niceness: int = 0
) -> R:
    """Compile, or only check, within the job's memory too. Cancelling ends the child.

    Raises ModelRefused with every reason, MissingFiles, ResourceExhausted where a limit was reached,
    Unavailable without a compiler, or another error the compiler reports.
    """

    def heard(news: News) -> None:
        if isinstance(news, Stage):
            progress(news)

    try:
        bounds = Bounds(memory_mib=job.memory_mib, niceness=niceness)
        return await do(job, heard, bounds, seconds=seconds)
    except TimeoutError as error:
        raise ResourceExhausted(
            f"compiling took longer than {seconds:g} s; raise compile_seconds in the configuration, "
            "or use a smaller model"
        ) from error
    except Died as died:
        raise ModelRefused(
            f"the compiler stopped without a result ({died}); it may have needed more than "
            f"the {job.memory_mib} MiB of compile_memory_mib, the service's log says more"
        ) from died


async def do(
    job: Job[R],
    heard: Callable[[News], None],
    bounds: Bounds,
    *,
    seconds: float | None,
    started: Callable[[Child], None] = lambda _: None,
) -> R:
    """The job's result, after what the child told meanwhile was passed on; cancelling ends the child.

    Raises what it reports, Died, Unavailable without a compiler, and TimeoutError after `seconds`.
    """
    if not places.compiler():
        raise Unavailable("the compiler is not installed; install honed-tuner (apt install honed-tuner)")
    listener = Listener(job)
    process = await spawn(job.program(), bounds, stdout=True)
    try:
        started(process)
        async with asyncio.timeout(seconds):
            await _listen(process, listener, heard)
            return listener.result(await process.wait())
    finally:
        await process.end()


async def _listen(process: Child, listener: Listener[R], heard: Callable[[News], None]) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a line longer than can be read
            kill_group(process.pid)
            return
        if not line:
            return
        try:
            news = listener.hear(line)
        except NoEvent as error:
            _log.warning("the compiler wrote what is no event: %s", error)
            continue
        if news is not None:
            heard(news)
