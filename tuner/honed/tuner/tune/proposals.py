"""What the searching child proposes, and when it is asked: while a batch is measured, for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from honed.jobs.events import Ranking
from honed.runtime.origin import Way
from honed.tuner import records as kept
from honed.tuner.verdict import Stored

from .search_child import DefaultSchedule, LoadedTask, Proposed, SearchBroke, SearchChild
from .task import TaskProgress, TuningTask

T = TypeVar("T")


class Proposals:
    """The searching child as a session asks it. Not for several threads."""

    def __init__(
        self,
        search: SearchChild,
        records: kept.Records,
        setup: kept.Setup,
        *,
        ahead: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `ahead`, batches are made while others are measured."""
        self.search = search
        self.seconds = 0.0  # waited for it so far
        self._records = records
        self._setup = setup
        self._ahead = ahead
        self._clock = clock
        self._outputs: dict[str, int] = {}
        self._told: set[str] = set()  # tasks whose records the present child knows
        self._child: int | None = None
        self._begun: TaskProgress | None = None  # that a batch is being made for
        self._made: dict[str, Proposed] = {}  # by task

    def add(self, task: TuningTask, outputs: int) -> None:
        """A task whose last `outputs` parameters are outputs may be proposed for from now on."""
        self._outputs[task.key] = outputs

    def load(self, task: TuningTask) -> LoadedTask:
        """Take up a task; raises SearchBroke, as all below do."""
        return self._waited(lambda: self._loaded(task, self.search.load(task, self._outputs[task.key])))

    def default(self, task: TuningTask, following: Sequence[TuningTask]) -> DefaultSchedule:
        """Take up a task, with its default schedule.

        Those of the tasks that follow are made beside it, and beside what comes next where that is allowed.
        """
        return self._waited(lambda: self._default(task, following))

    def next(self, progress: TaskProgress) -> Proposed:
        """The next batch of a task: first of all what was best with another driver or compiler."""
        key = progress.task.key
        made = self._made.pop(key, None)
        return made or self._waited(lambda: self._stale(progress) or self._proposed(progress))

    def begin(self, progress: TaskProgress | None) -> None:
        """Have the next batch of a task made beside what follows, until `settle`."""
        if not self._ahead or progress is None or progress.task.key in self._made:
            return
        if progress.rounds == 0 and self._records.stale(progress.task.key, self._setup):
            return
        with suppress(SearchBroke):  # shows when it is asked for
            self._begin(progress)
            self._begun = progress

    def settle(self) -> None:
        """Wait for what was begun. Where that broke, it is asked for again in its turn, and breaks then."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with suppress(SearchBroke):
                self._made[begun.task.key] = self._waited(lambda: self._collected(begun))

    def learn(self, task: TuningTask, results: Mapping[str, float | None]) -> Ranking | None:
        """Tell what a batch took; gives how well it had been ranked, where that can be said."""
        if self._child is None or self.search.pid != self._child:
            return None  # its successor reads the records
        return self._waited(lambda: self.search.learn(task.key, results))

    def _default(self, task: TuningTask, following: Sequence[TuningTask]) -> DefaultSchedule:
        beside = [(one, self._outputs[one.key]) for one in following]
        made = self.search.default(task, self._outputs[task.key], beside, settle=not self._ahead)
        self._loaded(task, made.loaded)
        return made

    def _stale(self, progress: TaskProgress) -> Proposed | None:
        key = progress.task.key
        stale = self._records.stale(key, self._setup) if progress.rounds == 0 else []
        if not stale:
            return None
        loaded = self.load(progress.task)
        entries = self.search.replay(key, [c.trace for c in stale])
        return Proposed(loaded=loaded, entries=entries, way=Way.AGAIN, last=False) if entries else None

    def _proposed(self, progress: TaskProgress) -> Proposed:
        self._begin(progress)
        return self._collected(progress)

    def _begin(self, progress: TaskProgress) -> None:
        task = progress.task
        known, kin = self._known(task.key), self._kin(task.key) if progress.rounds == 0 else []
        self.search.begin(task, self._outputs[task.key], known, kin, progress.rounds)

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

    def _waited(self, ask: Callable[[], T]) -> T:
        began = self._clock()
        try:
            return ask()
        finally:
            self.seconds += self._clock() - began
