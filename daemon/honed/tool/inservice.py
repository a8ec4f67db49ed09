"""The compiler's commands run by the service, which has the records and the device.

A file of its own: `compiler.py` runs where no msgpack is installed, and this imports the client.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic

from honed.jobs.commands import Job
from honed.jobs.events import News, NoEvent, R, from_map
from honed.protocol.errors import HonedError, Internal
from honed.protocol.methods import TUNER_RUN
from honed.protocol.params import TunerRunParams
from honed.protocol.service import TunerRan
from honed.protocol.strict import Map
from honed.protocol.wire import close_all
from honed.runtime.client import Client

from .compiler import CompilerDied


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
        with suppress(HonedError), Client(self._socket) as client:
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
