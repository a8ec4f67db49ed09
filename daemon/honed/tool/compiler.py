"""Runs jobs of the compiler, `python -m honed.tuner`, in a child of the tool or in the service."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

from honed.daemon.settings import places
from honed.daemon.settings.schema import Limits
from honed.jobs.commands import Died, Job, Listener
from honed.jobs.events import News, NoEvent, R, from_map
from honed.machine import children
from honed.machine.children import Bounds, RunningChild
from honed.protocol.errors import DeadlineExceeded, HonedError, Internal, NotFound, ResourceExhausted
from honed.protocol.methods import TUNER_RUN
from honed.protocol.params import TunerRunParams
from honed.protocol.service import TunerRan
from honed.protocol.strict import Map

from .progress import Reporter

# ---- Runs jobs of the compiler, `python -m honed.tuner`, in a child of the tool ----

R_co = TypeVar("R_co", covariant=True)


class RunningJob(Protocol[R_co]):
    """A running job, wherever that is."""

    def events(self) -> Iterator[News]:
        """What it tells while it works, until it has said its last word."""

    def interrupt(self) -> None:
        """Ask it to stop soon and to use what it has."""

    def result(self) -> R_co:
        """Its last word; to be called when `events` has ended. Raises what it reports, and CompilerDied."""


class CompilerDied(HonedError):
    """The child ended without a last word, or said something that makes no sense."""


class CompilerChild(Generic[R]):
    """A job that runs in a child; as `RunningJob`."""

    def __init__(self, job: Job[R], running: RunningChild) -> None:
        self._listener = Listener(job)
        self._running = running

    def events(self) -> Iterator[News]:
        """See `RunningJob`."""
        for line in self._running.lines():
            try:
                news = self._listener.hear(line)
            except NoEvent as error:
                raise CompilerDied(
                    f"the compiler said something that is no event: {error}; compare versions"
                ) from error
            if news is not None:
                yield news

    def interrupt(self) -> None:
        """See `RunningJob`."""
        self._running.interrupt()

    def result(self) -> R:
        """See `RunningJob`."""
        try:
            return self._listener.result(self._running.death())
        except Died as died:
            raise _reason(died) from died


def _reason(died: Died) -> HonedError:
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
def started(job: Job[R], limits: Limits, *, seconds: float | None = None) -> Iterator[CompilerChild[R]]:
    """Starts a job; it is killed at the end, and when `seconds` are over.

    Raises NotFound without the compiler.
    """
    if not places.compiler():
        raise NotFound("the compiler is not installed; install honed-tuner (apt install honed-tuner)")
    bounds = Bounds(memory_mib=limits.compile_memory_mib)
    with children.started(job.program(), bounds, seconds=seconds) as running:
        yield CompilerChild(job, running)


def run(job: Job[R], title: str, limits: Limits | None = None) -> R:
    """Do a job with progress on stderr.

    The child is killed past `limits.compile_seconds`, and whenever this call ends before it did. Raises
    ModelRefused with every reason, NotFound without the compiler, the child's own errors, and CompilerDied.
    """
    limits = limits or Limits()
    with started(job, limits, seconds=limits.compile_seconds) as child:
        return followed(child, title)


def followed(work: RunningJob[R], title: str) -> R:
    """Its result, with progress on stderr."""
    with Reporter(title) as reporter:
        for news in work.events():
            reporter.show(news)
        return work.result()


# ---- The compiler's commands run by the service, whose the records and the device are ----


class Remote(Generic[R]):
    """A command running in the service; as `RunningJob`. `descriptors` came with the result."""

    def __init__(
        self, socket: str | None, job: type[Job[R]], params: TunerRunParams, descriptors: Sequence[int]
    ) -> None:
        self.descriptors: list[int] = []
        self._answered: TunerRan | None = None
        self._result = job.result()
        self._params = params
        self._socket = socket
        from honed.runtime.client import Client  # and msgpack, without which a compiler here does

        self._client = Client(socket)
        self._sent = descriptors
        self._news: queue.SimpleQueue[Map | None] = queue.SimpleQueue()
        self._error: HonedError | None = Internal("the service's answer was not awaited")
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    def events(self) -> Iterator[News]:
        """See `RunningJob`."""
        while (plain := self._news.get()) is not None:
            event = _event(plain, self._result)
            if isinstance(event, News):
                yield event

    def interrupt(self) -> None:
        """Ask it to stop soon and to use what it has. For signal handlers: does not wait."""
        threading.Thread(target=self._stop, daemon=True).start()

    def result(self) -> R:
        """See `RunningJob`; raises what the service answered."""
        self._thread.join()
        if isinstance(self._error, Internal):
            raise CompilerDied(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        last = _event(self.answered.event, self._result)
        if isinstance(last, self._result):
            return last
        raise CompilerDied(f"the service answered with {type(last).__name__.lower()}; compare versions")

    @property
    def answered(self) -> TunerRan:
        """The service's answer, once there is a result."""
        assert self._answered is not None
        return self._answered

    def close(self) -> None:
        """End the connection; the service ends what still runs."""
        self._client.close()
        from honed.protocol.wire import close_all

        close_all(self.descriptors)

    def _run(self) -> None:
        try:
            told, self.descriptors = self._client.run_tuner(
                self._params, descriptors=self._sent, progress=lambda news: self._news.put(news["event"])
            )
            self._answered = TUNER_RUN.result_of(told)
            self._error = None
        except HonedError as error:
            self._error = error
        finally:
            self._news.put(None)

    def _stop(self) -> None:
        with suppress(HonedError), type(self._client)(self._socket) as client:
            client.stop_tuner(self._params.model or "")


def _event(plain: object, result: type[R]) -> News | R | HonedError:
    try:
        return from_map(plain, result)
    except NoEvent as error:
        raise CompilerDied(f"the service told what is no event: {error}; compare versions") from error


@contextmanager
def started_in_service(
    socket: str | None, job: type[Job[R]], descriptors: Sequence[int] = (), **options: Any
) -> Iterator[Remote[R]]:
    """Has the service at `socket` do a job of this kind (TunerRun); it ends with this context."""
    given = {key: value for key, value in options.items() if value not in (None, "", False)}
    remote = Remote(socket, job, TunerRunParams(command=job.command[-1], **given), descriptors)
    try:
        yield remote
    finally:
        remote.close()
