"""The children that run TVM for a session: one searches, one compiles with the schedules found.

`SearchChild` has a method for each call of the searching child, and raises an exception when the child dies.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from honed.jobs.commands import Compile, do
from honed.jobs.events import Ranking
from honed.machine.profile import DeviceProfile
from honed.process.children import JobCrashed, python
from honed.process.rpc import Call, ChildCrashed, R, RpcChild
from honed.protocol.errors import AlreadyExists, DeviceError, HonedError, Internal, ModelRefused
from honed.runtime.compiled.model import SearchStrategy
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.records.rows import MeasurementSetup, NewCandidate, StoredOutcome
from honed.tuner.records.store import HINTS_PER_TASK, InQuarantine, ProcessIdentity, Records

from .task import ModelTasks, TaskProgress, TuningTask

BATCH = 16  # Candidates of a proposal
COMMAND = python("honed.tuner.tune.searcher")
_COMPILE_SECONDS = 900.0
_OWNER = "owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSearch(Call[None]):
    """Search for a device, a `batch` at a time; functions lie in `folder` for a successor to take up.

    `cost_model` is the file that the cost model is kept in. Without `answers`, workloads have no sets of
    inputs.
    """

    profile: DeviceProfile
    folder: Path
    cost_model: Path
    seed: int
    threads: int
    batch: int
    answers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Extract(Call[ModelTasks]):
    """Find a model's tasks; `calibration` and `existing_build` as in `CompileRequest`."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    precision: str
    calibration: Path | None = None
    existing_build: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt(Call[ModelTasks]):
    """Take one function, as TVM's JSON text, for the only task."""

    func: str
    name: str
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTask:
    """A loaded task; `fresh` is true while its search has not seen earlier measurements."""

    workload: Workload
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTask(Call[LoadedTask]):
    """Load a task for `Propose` and `Replay`."""

    task: TuningTask


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSchedule:
    """A loaded task with its default schedule."""

    loaded: LoadedTask
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeDefault(Call[DefaultSchedule]):
    """Load a task and make its default schedule a candidate; start on those of the tasks that follow.

    With `settle` all of them are ready when the call returns.
    """

    task: TuningTask
    following: tuple[TuningTask, ...]
    settle: bool


@dataclass(frozen=True, slots=True)
class ProposedCandidate:
    """A proposed candidate; `candidate` is None where lowering refused it, and `refused` says why."""

    id: str
    trace: str
    score: float | None
    candidate: Candidate | None
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A batch of a task.

    `way` is the strategy that proposed it; `last`: only the best schedule is left to try.
    """

    loaded: LoadedTask
    entries: tuple[ProposedCandidate, ...]
    way: SearchStrategy
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose(Call[Proposed | None]):
    """Load a task and propose a batch of it; return None where no schedule rule fits the function.

    `known` are traces with their seconds (None: refused) that the search has not learned from yet, `related`
    the best ones of other tasks, which count in the first round only.
    """

    task: TuningTask
    known: tuple[tuple[str, float | None], ...]
    related: tuple[str, ...]
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Call[tuple[ProposedCandidate, ...]]):
    """Turn recorded schedules of a loaded task into candidates, except those that do not fit."""

    task: str
    traces: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCostModel(Call[Ranking | None]):
    """Learn from a batch of a loaded task, seconds by id (None: refused).

    Return how well it had been ranked.
    """

    task: str
    results: dict[str, float | None]


def scratch(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder, after removing those of this prefix whose processes have ended."""
    sweep(Path(tempfile.gettempdir()), prefix)
    made = tempfile.TemporaryDirectory(prefix=prefix)
    (Path(made.name) / _OWNER).write_text(str(ProcessIdentity.this_process()))
    return made


def sweep(place: Path, prefix: str) -> None:
    """Remove this user's folders in `place` that begin with `prefix` and whose process certainly ended."""
    for folder in place.glob(f"{prefix}*"):
        # Another process may be removing the same folders, and other users' folders are not ours to remove.
        with suppress(OSError, ValueError):
            about = folder.lstat()
            ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
            if ours and ProcessIdentity.parse((folder / _OWNER).read_text()).has_ended():
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time limits of the child's calls, in seconds; a call that exceeds its limit counts as hung."""

    start: float = 120.0
    extract: float = 600.0
    load: float = 180.0
    propose: float = 90.0


_DEADLINES = Deadlines()


class SearchFailed(Exception):
    """Raised when the search of a task failed, crashed or hung; the text says how.

    Other tasks may still be loaded.
    """


class SearchKilled(SearchFailed):
    """Raised when the process was ended by SIGKILL, so that the task is not at fault."""


class NoSchedule(SearchFailed):
    """Raised when no schedule rule fits a task's function; a retry has the same result."""


class SearchChild:
    """A context manager around the child, started again whenever it ends. Not for several threads."""

    def __init__(
        self,
        profile: DeviceProfile,
        cost_model: Path,
        seed: int,
        command: Sequence[str] = COMMAND,
        deadlines: Deadlines = _DEADLINES,
        *,
        batch: int = BATCH,
        answers: bool = True,
        threads: int = 1,
    ) -> None:
        """Set up the search; no child is started yet.

        `batch` is how many candidates it proposes at once, `threads` how many threads a search may use.
        Without `answers` its workloads have no sets of inputs. `command` starts another child in tests.
        """
        self._threads = threads
        self._deadlines = deadlines
        self._command = tuple(command)
        self._folder = scratch("honed-search-")
        self._opening = StartSearch(
            profile=profile,
            folder=Path(self._folder.name),
            cost_model=cost_model,
            seed=seed,
            threads=threads,
            batch=batch,
            answers=answers,
        )
        self._child: RpcChild | None = None

    def __enter__(self) -> SearchChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and remove its files."""
        self._stop()
        self._folder.cleanup()

    def find_tasks(self, call: Extract | Adopt) -> ModelTasks:
        """Return the tasks that later calls may load; ask once more where a signal ended the child.

        Raises ModelRefused as compiling does, Internal where the child breaks.
        """
        try:
            with suppress(SearchKilled):
                return self._ask(call, self._deadlines.extract)
            return self._ask(call, self._deadlines.extract)
        except SearchFailed as broke:
            raise Internal(f"the compiler broke while it extracted the model's tasks: {broke}") from broke

    def load(self, task: TuningTask) -> LoadedTask:
        """Load a task. Raises SearchFailed, as all methods below do."""
        return self._ask(LoadTask(task=task), self._deadlines.load)

    def default(self, task: TuningTask, following: Sequence[TuningTask], *, settle: bool) -> DefaultSchedule:
        """Load a task and make its default schedule; start on the schedules of the tasks that follow.

        With `settle` nothing goes on being made after the answer.
        """
        following = following[: self._threads - settle]
        call = MakeDefault(task=task, following=tuple(following), settle=settle)
        return self._ask(call, self._deadlines.load + self._deadlines.propose)

    def begin(
        self, task: TuningTask, known: Sequence[tuple[str, float | None]], related: Sequence[str], round_: int
    ) -> None:
        """Start making a batch of a loaded task.

        `collect` returns it, and must be called before any other method.

        `known` are traces with their seconds (None: refused), `related` the best of other tasks.
        """
        call = Propose(task=task, known=tuple(known), related=tuple(related), round=round_)
        self._start().begin(call)

    def collect(self) -> Proposed:
        """Wait for the batch that `begin` requested, and return it."""
        proposed = self._call(lambda child: child.answer(Propose, self._deadlines.propose))
        if proposed is None:
            raise NoSchedule("no schedule rule fits the function")
        return proposed

    def replay(self, task: str, traces: Sequence[str]) -> Sequence[ProposedCandidate]:
        """Return candidates of a loaded task with the schedules of `traces` that fit."""
        return self._ask(Replay(task=task, traces=tuple(traces)), self._deadlines.propose)

    def learn(self, task: str, results: Mapping[str, float | None]) -> Ranking | None:
        """Report the times of a batch; return how well it had been ranked, where that can be said."""
        if self._child is None:
            return None  # A new child learns from the records instead
        return self._ask(UpdateCostModel(task=task, results=dict(results)), self._deadlines.propose)

    def _ask(self, call: Call[R], seconds: float) -> R:
        return self._call(lambda child: child.call(call, seconds=seconds))

    def _call(self, ask: Callable[[RpcChild], R]) -> R:
        try:
            return ask(self._start())
        except ChildCrashed as ended:
            self._child = None
            kind = SearchKilled if ended.death.killed else SearchFailed
            raise kind(f"the compiler ended: {ended}") from ended
        except ModelRefused:
            raise
        except HonedError as error:
            raise SearchFailed(str(error)) from error

    def _start(self) -> RpcChild:
        """Return the child, and start it first where there is none."""
        if self._child is not None:
            return self._child
        log = Path(self._folder.name) / "search.log"
        started = self._child = RpcChild(self._command, log=log)
        try:
            self._ask(self._opening, self._deadlines.start)
        except SearchFailed:
            self._stop()
            raise
        return started

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def compile_apart(job: Compile) -> None:
    """Compile; raises ModelRefused with the compiler's reasons, DeviceError where it fails.

    A file that fell back to default rules is refused, too, because it lacks the schedules that were found.
    """
    try:
        compiled = do(job, seconds=_COMPILE_SECONDS)
    except ModelRefused:
        raise
    except HonedError as error:
        raise DeviceError(str(error)) from error
    except JobCrashed as died:
        raise DeviceError(f"compiling with the best schedules failed: {died}") from died
    if compiled.fell_back:
        raise ModelRefused(compiled.fell_back)


class Proposals:
    """A session's view of the searching child: it proposes the next batch while another one is measured.

    Not for several threads.
    """

    def __init__(
        self,
        search: SearchChild,
        records: Records,
        setup: MeasurementSetup,
        *,
        ahead: bool,
        hints: int = HINTS_PER_TASK,
    ) -> None:
        """Set up the proposals; with `ahead`, batches are made while others are measured.

        At most `hints` records of a hub are tried per task and day.
        """
        self.search = search
        self.seconds = 0.0  # Seconds that the session has waited for the child
        self._records = records
        self._setup = setup
        self._ahead = ahead
        self._hints = hints
        self._begun: TaskProgress | None = None  # The task whose next batch is being made
        self._made: dict[str, Proposed] = {}  # Finished batches by task

    def default(self, task: TuningTask, following: Sequence[TuningTask]) -> DefaultSchedule:
        """Load a task and return its default schedule; raises SearchFailed, as all methods below do.

        The schedules of the tasks that follow are made beside it, and beside later work where that is
        allowed.
        """
        with self._waiting():
            return self.search.default(task, following, settle=not self._ahead)

    def has_hints(self, task: TuningTask) -> bool:
        """Return whether a hub's records have something to try for a task."""
        return bool(self._records.hints(task.key, self._setup, self._hints))

    def next(self, progress: TaskProgress) -> Proposed:
        """Return the next batch of a task.

        Schedules that were best on others' boards, drivers or compilers come first.
        """
        made = self._made.pop(progress.task.key, None)
        if made is not None:
            return made
        with self._waiting():
            stale = self._stale(progress)
            if stale is None:
                self._begin(progress)
            return stale or self.search.collect()

    def begin(self, progress: TaskProgress | None) -> None:
        """Have the next batch of a task made beside other work, until `settle`."""
        if not self._ahead or progress is None or progress.task.key in self._made:
            return
        stale = self._records.stale(progress.task.key, self._setup) or self.has_hints(progress.task)
        if progress.rounds == 0 and stale:
            return
        with suppress(SearchFailed):  # The error is raised again when this batch is requested
            self._begin(progress)
            self._begun = progress

    def settle(self) -> None:
        """Wait for the batch that `begin` started.

        If that failed, the batch is requested again in its turn, and raises then.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            with suppress(SearchFailed), self._waiting():
                self._made[begun.task.key] = self.search.collect()

    def learn(self, task: TuningTask, results: Mapping[str, float | None]) -> Ranking | None:
        """Report the times of a batch; return how well it had been ranked, where that can be said."""
        with self._waiting():
            return self.search.learn(task.key, results)

    def _stale(self, progress: TaskProgress) -> Proposed | None:
        if progress.rounds:
            return None
        key = progress.task.key
        stale = self._records.stale(key, self._setup)
        entries = self._candidates_of_hints(progress.task)
        if not stale and not entries:
            return None
        loaded = self.search.load(progress.task)
        entries += self.search.replay(key, [c.trace for c in stale]) if stale else []
        if not entries:
            return None
        return Proposed(loaded=loaded, entries=tuple(entries), way=SearchStrategy.REVALIDATED, last=False)

    def _candidates_of_hints(self, task: TuningTask) -> list[ProposedCandidate]:
        """Return the candidates of a hub's records that fit a task.

        They are tried one by one, so that a record that breaks the search is noted and skipped.
        """
        entries: list[ProposedCandidate] = []
        found: Sequence[ProposedCandidate]
        for hint in self._records.hints(task.key, self._setup, self._hints):
            try:
                self.search.load(task)
                found, why = self.search.replay(task.key, [hint.trace]), "it does not fit the task"
            except SearchFailed as broke:
                found, why = [], str(broke)
            if found and found[0].candidate is not None:
                entries += found
                continue
            new = NewCandidate(
                workload=task.key, setup=self._setup, trace=hint.trace, way=SearchStrategy.REVALIDATED
            )
            with suppress(InQuarantine, AlreadyExists):
                self._records.refuse(new, found[0].refused if found else why)
        return entries

    def _begin(self, progress: TaskProgress) -> None:
        task = progress.task
        known = self._traces_measured(task.key) if self.search.load(task).fresh else []
        related: list[str] = []
        # The child picks the related ones from the best schedules of all other tasks
        if progress.rounds == 0:
            related = [c.trace for c in self._records.distil(self._setup) if c.workload != task.key]
        self.search.begin(task, known, related, progress.rounds)

    def _traces_measured(self, key: str) -> list[tuple[str, float | None]]:
        """Return traces measured before on this setup; those in quarantine come as refused."""
        return [
            (c.trace, c.timing.fair_s if c.outcome is StoredOutcome.RIGHT and c.timing else None)
            for c in self._records.history(key, self._setup)
        ]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began
