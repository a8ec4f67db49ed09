"""Which candidate a fault in the kernel log belongs to."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from honed.machine.kernellog import (
    SETTLE_S,
    Certainty,
    DatedFault,
    FaultStory,
    GpuRun,
    Process,
    Reader,
    attribute,
    group,
    ids_of,
    open_reader,
    seen,
)
from honed.protocol.errors import HonedError

_KEPT_RUNS = 16
_KEPT_S = 60.0  # of faults, so that late records join their story
_log = logging.getLogger(__name__)


def kernel_log(tell: Callable[[str], None]) -> Reader | None:
    """The kernel log; None where it cannot be read, of which `tell` gets a sentence."""
    try:
        return open_reader()
    except HonedError as error:
        tell(f"candidates are not watched for GPU faults: {error}")
        return None


@dataclass(slots=True)
class _Owner:
    """A child and what it ran; `ids` None where the kernel's numbers cannot be known."""

    pid: int
    ids: frozenset[int] | None
    runs: list[GpuRun] = field(default_factory=list)

    def process(self) -> Process:
        return Process(pid=self.pid, ids=self.ids, runs=tuple(self.runs))


class FaultWatch:
    """Reads the kernel log while children run candidates. Without a reader it watches nothing."""

    def __init__(self, reader: Reader | None) -> None:
        self._reader = reader
        self._owners: list[_Owner] = []
        self._seen: list[DatedFault] = []
        self._told: set[tuple[float, str]] = set()
        self._found: list[tuple[str, FaultStory]] = []

    @property
    def watching(self) -> bool:
        """Whether a fault could be seen at all."""
        return self._reader is not None

    def adopt(self, pid: int) -> None:
        """A new child has opened the device."""
        self._owners = [*self._owners[-1:], _Owner(pid, ids_of(pid))]

    def started(self, name: str) -> None:
        """The child begins to run candidate `name`."""
        owner, run = self._owners[-1], GpuRun(name=name, started_s=time.monotonic(), ended_s=None)
        owner.runs = [*owner.runs[1 - _KEPT_RUNS :], run]

    def ended(self) -> None:
        """It does not run any more."""
        owner = self._owners[-1]
        if owner.runs and owner.runs[-1].ended_s is None:
            owner.runs[-1] = replace(owner.runs[-1], ended_s=time.monotonic())

    def settle(self, since: float) -> None:
        """Look for faults until SETTLE_S after `since` (time.monotonic), or one is found."""
        before = len(self._found)
        self.look()
        while self._reader is not None and len(self._found) == before:
            left = since + SETTLE_S - time.monotonic()
            if left <= 0:
                break
            select.select([self._reader.fileno()], [], [], left)
            self.look()

    def look(self) -> None:
        """Read what the log has now."""
        fresh = self._read()
        if not fresh:
            return
        for owner in self._owners:
            now = ids_of(owner.pid)
            owner.ids = None if owner.ids is None or now is None else owner.ids | now
        horizon = time.monotonic() - _KEPT_S
        self._seen = [one for one in self._seen if one.monotonic_s > horizon] + fresh
        for story in group(self._seen):
            key = (story.first_s, story.seen[0].fault.text)
            if key not in self._told:
                self._told.add(key)
                self._blame(story)

    def of(self, name: str) -> FaultStory | None:
        """A fault found to be candidate `name`'s."""
        return next((story for found, story in self._found if found == name), None)

    def take(self) -> list[tuple[str, FaultStory]]:
        """All faults found since the last call, with the candidates they belong to."""
        found, self._found = self._found, []
        return found

    def _read(self) -> list[DatedFault]:
        fresh: list[DatedFault] = []
        while self._reader is not None:
            try:
                records = self._reader.read()
            except HonedError as error:
                _log.warning("faults are no longer looked for: %s", error)
                self._reader = None
                break
            if not records:
                break
            fresh += [one for one in map(seen, records) if one is not None]
        return fresh

    def _blame(self, story: FaultStory) -> None:
        attribution = attribute(story, [owner.process() for owner in self._owners])
        if attribution.certainty in (Certainty.NAMED, Certainty.TIMING) and attribution.runs:
            # Records come late, by about as long as a candidate takes to build: the latest one it is.
            self._found.append((attribution.runs[-1].name, story))
        elif attribution.certainty is Certainty.NAMED:
            _log.warning(
                "the kernel log has a fault of the measuring child while it ran nothing: %s", story.cause.text
            )
