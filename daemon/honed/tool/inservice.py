"""Runs jobs of the compiler in the service, which has the records and the device.

A module of its own, as it imports the client: `compiler.py` runs without msgpack, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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
    given = {key: value for key, value in options.items() if value not in (None, "", False)}
    with Client(socket) as client:
        remote = ServiceJob(client, job, TunerRunParams(command=job.command[-1], **given), descriptors)
        try:
            yield remote
        finally:
            close_all(remote.descriptors)
