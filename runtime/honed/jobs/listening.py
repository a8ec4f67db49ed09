"""What a child that does a job has told so far, and what it comes to."""

from __future__ import annotations

from typing import Generic

from honed.machine.children import FREE, Bounds, Death, started
from honed.protocol.errors import HonedError

from .commands import Job
from .events import News, R, parse


class Died(Exception):
    """The child ended without a last word, or badly after it; the text is a clause about it."""

    def __init__(self, death: Death) -> None:
        super().__init__(str(death))
        self.death = death


class Listener(Generic[R]):
    """Hears the lines of one child."""

    def __init__(self, job: Job[R]) -> None:
        self._result = job.result()
        self._last: R | HonedError | None = None

    def hear(self, line: bytes) -> News | None:
        """The news of a line; None for the last word, which is kept. Raises NoEvent for anything else."""
        event = parse(line, self._result)
        if isinstance(event, News):
            return event
        self._last = event
        return None

    def result(self, death: Death) -> R:
        """What the job came to, once the child has ended; raises what it reported, and Died."""
        if isinstance(self._last, HonedError):
            raise self._last
        if self._last is None or death.status != 0:
            raise Died(death)
        return self._last


def do(job: Job[R], bounds: Bounds = FREE, *, seconds: float) -> R:
    """Have a child do a job within `seconds`; raises what it reports, Died, and NoEvent for other output."""
    listener = Listener(job)
    with started(job.program(), bounds, seconds=seconds) as child:
        for line in child.lines():
            listener.hear(line)
        return listener.result(child.death())
