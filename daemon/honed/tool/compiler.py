"""Runs jobs of the compiler, `python -m honed.tuner`, in a child of the tool or in the service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from honed.daemon.settings import places
from honed.daemon.settings.schema import Limits
from honed.jobs.commands import Job, Listener
from honed.jobs.events import News, NoEvent, R, from_map
from honed.process import children
from honed.process.children import JobCrashed, ResourceLimits, RunningChild
from honed.protocol.errors import DeadlineExceeded, HonedError, Internal, NotFound, ResourceExhausted
from honed.protocol.methods import TUNER_RUN
from honed.protocol.params import TunerRunParams
from honed.protocol.service import TunerRan
from honed.protocol.strict import Map

from .output import Reporter

if TYPE_CHECKING:
    from honed.runtime.client import Client

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


class ServiceJob(Generic[R]):
    """A `RunningJob` in the service; `descriptors` are the files that the service sent with the result."""

    def __init__(
        self, client: Client, job: type[Job[R]], params: TunerRunParams, descriptors: Sequence[int]
    ) -> None:
        self.descriptors: list[int] = []
        self._answered: TunerRan | None = None
        self._client, self._result = client, job.result()
        self._params, self._sent = params, descriptors

    def result(self, heard: Callable[[News], None]) -> R:
        """Run the job and return its result; raise the service's errors, and CompilerDied."""

        def on_news(news: Map) -> None:
            event = _event(news["event"], self._result)
            if isinstance(event, News):
                heard(event)

        try:
            plain, self.descriptors = self._client.run_tuner(
                self._params, descriptors=self._sent, progress=on_news
            )
            self._answered = TUNER_RUN.result_of(plain)
        except Internal as error:
            raise CompilerDied(str(error)) from error
        last = _event(self._answered.event, self._result)
        if isinstance(last, self._result):
            return last
        raise CompilerDied(f"the service answered with {type(last).__name__.lower()}; compare versions")

    @property
    def answered(self) -> TunerRan:
        """The service's answer; available once there is a result."""
        assert self._answered is not None
        return self._answered

    def interrupt(self) -> None:
        """Ask the service to stop the job soon; does not wait."""
        threading.Thread(target=self._stop, daemon=True).start()

    def _stop(self) -> None:
        from honed.runtime.client import Client

        with suppress(HonedError), Client(self._client.socket) as client:
            client.stop_tuner(self._params.model or "")


def _event(plain: object, result: type[R]) -> News | R | HonedError:
    try:
        return from_map(plain, result)
    except NoEvent as error:
        raise CompilerDied(f"the service told what is no event: {error}; compare versions") from error


@contextmanager
def running_in_service(
    socket: str | None, job: type[Job[R]], descriptors: Sequence[int] = (), **options: Any
) -> Iterator[ServiceJob[R]]:
    """Prepare a job of this kind (TunerRun) for the service at `socket`; close its descriptors at the end."""
    # A job in a child needs neither NumPy nor msgpack.
    from honed.protocol.wire import close_all
    from honed.runtime.client import Client

    given = {key: value for key, value in options.items() if value not in (None, "", False)}
    with Client(socket) as client:
        remote = ServiceJob(client, job, TunerRunParams(command=job.command[-1], **given), descriptors)
        try:
            yield remote
        finally:
            close_all(remote.descriptors)
