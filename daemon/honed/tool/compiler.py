"""Runs jobs of the compiler, `python -m honed.tuner`, in a child of the tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from honed.daemon.settings import places
from honed.daemon.settings.schema import Limits
from honed.jobs.commands import Job, Listener
from honed.jobs.events import News, NoEvent, R
from honed.process import children
from honed.process.children import JobCrashed, ResourceLimits, RunningChild
from honed.protocol.errors import DeadlineExceeded, HonedError, NotFound, ResourceExhausted

from .output import Reporter

R_co = TypeVar("R_co", covariant=True)


class RunningJob(Protocol[R_co]):
    """A running job, in a child or in the service."""

    def result(self, heard: Callable[[News], None]) -> R_co:
        """Return the job's result; pass its news to `heard`.

        Raises errors that the job reports, and CompilerDied.
        """

    def interrupt(self) -> None:
        """Ask the job to stop soon and to use what it has; does not wait, as signal handlers call it."""


class CompilerDied(HonedError):
    """Raised when the child ends without a result, or sends what is no event."""


class CompilerChild(Generic[R]):
    """A `RunningJob` in a child process."""

    def __init__(self, job: Job[R], running: RunningChild) -> None:
        self._listener = Listener(job)
        self._running = running

    def result(self, heard: Callable[[News], None]) -> R:
        """Return the child's result; raise its errors, and CompilerDied if it ends without one."""
        for line in self._running.lines():
            try:
                news = self._listener.hear(line)
            except NoEvent as error:
                raise CompilerDied(
                    f"the compiler said something that is no event: {error}; compare versions"
                ) from error
            if news is not None:
                heard(news)
        try:
            return self._listener.result(self._running.death())
        except JobCrashed as died:
            raise _reason(died) from died

    def interrupt(self) -> None:
        """Ask the child to stop soon; does not wait."""
        self._running.interrupt()


def _reason(died: JobCrashed) -> HonedError:
    death = died.death
    if death.deadline is not None:
        return DeadlineExceeded(
            f"compiling took longer than {death.deadline:g} s; "
            "compile on a faster machine, or raise --time-limit"
        )
    if death.killed:
        return ResourceExhausted("the compiler was killed, probably because memory ran out; free some memory")
    return CompilerDied(f"the compiler stopped without a result ({death})")


@contextmanager
def running_job(job: Job[R], limits: Limits, *, seconds: float | None = None) -> Iterator[CompilerChild[R]]:
    """Start a job in a child; kill it at the end, or after `seconds`.

    Raises NotFound without the compiler.
    """
    if not places.compiler():
        raise NotFound(places.NO_COMPILER)
    bounds = ResourceLimits(memory_mib=limits.compile_memory_mib)
    with children.running(job.program(), bounds, seconds=seconds) as running:
        yield CompilerChild(job, running)


def run(job: Job[R], title: str, limits: Limits | None = None) -> R:
    """Run a job in a child, with progress on stderr.

    The child is killed after `limits.compile_seconds`, and if this call ends early. Raises ModelRefused with
    every reason, NotFound without the compiler, the child's own errors, and CompilerDied.
    """
    limits = limits or Limits()
    with running_job(job, limits, seconds=limits.compile_seconds) as child:
        return follow(child, title)


def follow(work: RunningJob[R], title: str) -> R:
    """Return a job's result, with progress on stderr."""
    with Reporter(title) as reporter:
        return work.result(reporter.show)
