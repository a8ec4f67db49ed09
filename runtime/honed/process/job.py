"""Jobs of child processes that end: arguments in, JSON lines out. `aio` has those of an event loop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from honed.machine import children
from honed.machine.children import FREE, Bounds, Death
from honed.protocol.strict import Map

Say = Callable[[Mapping[str, object]], None]
# A job whose lines are read as they come.
started = children.started
RunningJob = children.RunningChild


@contextmanager
def answering() -> Iterator[Say]:
    """Yield the function by which a job writes a map on the standard output that it was started with.

    Everything else that prints there, as drivers and libraries do, goes to standard error from now on.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield lambda answer: print(json.dumps(answer), file=answers, flush=True)


def run(
    program: Sequence[str],
    bounds: Bounds = FREE,
    *,
    seconds: float | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[list[Map], Death]:
    """Run a job for `seconds` at most; return the maps that it wrote, without other lines, and its end."""
    said, death = children.run(program, bounds, seconds=seconds, environment=environment)
    answers = []
    for line in said.splitlines():
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict):
            answers.append(answer)
    return answers, death


class Died(Exception):
    """A job ended without a last word, or badly after it; the text is a clause about it."""

    def __init__(self, death: Death) -> None:
        super().__init__(str(death))
        self.death = death
