"""What the searching child proposes, and when it is asked: while a batch is measured, for the next one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from honed.jobs.events import Ranking
from honed.protocol.errors import AlreadyExists
from honed.runtime.origin import Way
from honed.tuner import records as kept
from honed.tuner.verdict import Stored

from .children import DefaultSchedule, LoadedTask, Proposed, ProposedCandidate, SearchBroke, SearchChild
from .task import TaskProgress, TuningTask


class Proposals:
    """The searching child as a session asks it. Not for several threads."""

    def __init__(
        self,
        search: SearchChild,
        records: kept.Records,
        setup: kept.Setup,
        *,
        ahead: bool,
        hints: int = kept.HINTS_PER_TASK,
    ) -> None:
        """With `ahead`, batches are made while others are measured.

        Of a task so many `hints` of a hub may be tried in a day.
        """
        self.search = search
        self.seconds = 0.0  # waited for it so far
        self._records = records
        self._setup = setup
        self._ahead = ahead
        self._hints = hints
        self._told: set[str] = set()  # tasks whose records the present child knows
        self._child: int | None = None
        self._begun: TaskProgress | None = None  # that a batch is being made for
        self._made: dict[str, Proposed] = {}  # by task

    def load(self, task: TuningTask) -> LoadedTask:
        """Take up a task; raises SearchBroke, as all below do."""
        with self._waiting():
            return self._loaded(task, self.search.load(task))

    def default(self, task: TuningTask, following: Sequence[TuningTask]) -> DefaultSchedule:
        """Take up a task, with its default schedule.

        Those of the tasks that follow are made beside it, and beside what comes next where that is allowed.
        """
        with self._waiting():
            made = self.search.default(task, following, settle=not self._ahead)
            self._loaded(task, made.loaded)
            return made

    def hinted(self, task: TuningTask) -> bool:
        """Whether a hub's records have something to try for a task."""
        return bool(self._records.hints(task.key, self._setup, self._hints))

    def next(self, progress: TaskProgress) -> Proposed:
        """The next batch of a task: first of all what was best on others' boards, drivers or compilers."""
        made = self._made.pop(progress.task.key, None)
        if made is not None:
            return made
        with self._waiting():
            return self._stale(progress) or self._proposed(progress)

    def begin(self, progress: TaskProgress | None) -> None:
        """Have the next batch of a task made beside what follows, until `settle`."""
        if not self._ahead or progress is None or progress.task.key in self._made:
            return
        stale = self._records.stale(progress.task.key, self._setup) or self.hinted(progress.task)
        if progress.rounds == 0 and stale:
            return
        with suppress(SearchBroke):  # shows when it is asked for
            self._begin(progress)
            self._begun = progress

    def settle(self) -> None:
        """Wait for what was begun. Where that broke, it is asked for again in its turn, and breaks then."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with suppress(SearchBroke), self._waiting():
                self._made[begun.task.key] = self._collected(begun)

    def learn(self, task: TuningTask, results: Mapping[str, float | None]) -> Ranking | None:
        """Tell what a batch took; gives how well it had been ranked, where that can be said."""
        if self._child is None or self.search.pid != self._child:
            return None  # its successor reads the records
        with self._waiting():
            return self.search.learn(task.key, results)

    def _stale(self, progress: TaskProgress) -> Proposed | None:
        if progress.rounds:
            return None
        key = progress.task.key
        stale = self._records.stale(key, self._setup)
        entries = self._hinted(progress.task)
        if not stale and not entries:
            return None
        loaded = self.load(progress.task)
        entries += self.search.replay(key, [c.trace for c in stale]) if stale else []
        return Proposed(loaded=loaded, entries=entries, way=Way.AGAIN, last=False) if entries else None

    def _hinted(self, task: TuningTask) -> list[ProposedCandidate]:
        """A hub's records, those that fit: one by one, so that what breaks the search is noted, and left."""
        entries = []
        for hint in self._records.hints(task.key, self._setup, self._hints):
            try:
                self.load(task)
                found, why = self.search.replay(task.key, [hint.trace]), "it does not fit the task"
            except SearchBroke as broke:
                found, why = [], str(broke)
            if found and found[0].candidate is not None:
                entries += found
                continue
            new = kept.NewCandidate(workload=task.key, setup=self._setup, trace=hint.trace, way=Way.AGAIN)
            with suppress(kept.InQuarantine, AlreadyExists):
                self._records.refuse(new, found[0].refused if found else why)
        return entries

    def _proposed(self, progress: TaskProgress) -> Proposed:
        self._begin(progress)
        return self._collected(progress)

    def _begin(self, progress: TaskProgress) -> None:
        task = progress.task
        known, kin = self._known(task.key), self._kin(task.key) if progress.rounds == 0 else []
        self.search.begin(task, known, kin, progress.rounds)

    def _collected(self, progress: TaskProgress) -> Proposed:
        proposed = self.search.collect()
        self._child = self.search.pid
        self._told.add(progress.task.key)
        return proposed

    def _loaded(self, task: TuningTask, loaded: LoadedTask) -> LoadedTask:
        self._child = self.search.pid
        if loaded.fresh:
            self._told.discard(task.key)
        return loaded

    def _known(self, key: str) -> list[tuple[str, float | None]]:
        """Traces measured before on this setup; those in quarantine come as refused."""
        if self.search.pid != self._child:
            self._told.clear()
        if key in self._told:
            return []  # the child knows them already
        return [
            (c.trace, c.timing.fair_s if c.outcome is Stored.RIGHT and c.timing else None)
            for c in self._records.history(key, self._setup)
        ]

    def _kin(self, key: str) -> list[str]:
        """The best of all other tasks; which of them are kin, the child finds out."""
        return [c.trace for c in self._records.distil(self._setup) if c.workload != key]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began
