"""Runs jobs of the compiler, `python -m honed.tuner`, in child processes within limits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from honed.daemon.settings import places
from honed.jobs.commands import Job, Listener
from honed.jobs.events import News, NoEvent, R, Stage
from honed.process import aio
from honed.process.aio import Child
from honed.process.children import JobCrashed, ResourceLimits
from honed.protocol.errors import ModelRefused, ResourceExhausted, Unavailable

_log = logging.getLogger(__name__)


async def compile_model(
    job: Job[R], seconds: float, progress: Callable[[Stage], None], *, niceness: int = 0
) -> R:
    """Compile a model, or check whether it compiles, within the job's memory. Cancellation ends the child.

    Raises ModelRefused with every reason, MissingFiles, ResourceExhausted if a limit was reached, Unavailable
    without a compiler, or another error that the compiler reports.
    """

    def report(news: News) -> None:
        if isinstance(news, Stage):
            progress(news)

    try:
        bounds = ResourceLimits(memory_mib=job.memory_mib, niceness=niceness)
        return await do(job, report, bounds, seconds=seconds)
    except TimeoutError as error:
        raise ResourceExhausted(
            f"compiling took longer than {seconds:g} s; raise compile_seconds in the configuration, "
            "or use a smaller model"
        ) from error
    except JobCrashed as died:
        memory = f"it may have needed more than the {job.memory_mib} MiB of compile_memory_mib, "
        why = memory if died.death.out_of_memory else ""
        raise ModelRefused(
            f"the compiler stopped without a result ({died}); {why}the service's log says more"
        ) from died


async def do(
    job: Job[R],
    heard: Callable[[News], None],
    bounds: ResourceLimits,
    *,
    seconds: float | None,
    started: Callable[[Child], None] = lambda _: None,
) -> R:
    """Run a job in a child process, pass its events to `heard`, and return its result.

    Cancellation ends the child. Raises the error that the child reports, JobCrashed, Unavailable without a
    compiler, and TimeoutError after `seconds`.
    """
    if not places.compiler():
        raise Unavailable(places.NO_COMPILER)
    listener = Listener(job)

    def hear(line: bytes) -> None:
        try:
            news = listener.hear(line)
        except NoEvent as error:
            _log.warning("the compiler wrote what is no event: %s", error)
            return
        if news is not None:
            heard(news)

    return listener.result(await aio.run(job.program(), hear, bounds, seconds=seconds, started=started))
