"""The children that have TVM in a session's place: the searching child, and one that compiles what was found.

What the searching child does are methods of its parent's hold on it; its death is an exception.
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
from honed.tuner import records as kept
from honed.tuner.records.store import ProcessIdentity
from honed.tuner.records.verdict import StoredOutcome

from .calls import (
    Adopt,
    DefaultSchedule,
    Extract,
    LoadedTask,
    LoadTask,
    MakeDefault,
    Propose,
    Proposed,
    ProposedCandidate,
    Replay,
    StartSearch,
    UpdateCostModel,
)
from .task import ModelTasks, TaskProgress, TuningTask

_OWNER = "owner"


def scratch(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder, after removing those of this prefix whose processes have ended."""
    sweep(Path(tempfile.gettempdir()), prefix)
    made = tempfile.TemporaryDirectory(prefix=prefix)
    (Path(made.name) / _OWNER).write_text(str(ProcessIdentity.this_process()))
    return made


def sweep(place: Path, prefix: str) -> None:
    """Remove this user's folders in `place` that begin with `prefix` and whose process certainly ended."""
    for folder in place.glob(f"{prefix}*"):
        # Another process may be clearing the same away, and folders of others are none of ours.
        with suppress(OSError, ValueError):
            about = folder.lstat()
            ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
            if ours and ProcessIdentity.parse((folder / _OWNER).read_text()).gone():
                shutil.rmtree(folder, ignore_errors=True)


BATCH = 16  # Candidates of a proposal
COMMAND = python("honed.tuner.tune.searcher")
_COMPILE_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long the child may take, in seconds; then it hangs."""

    start: float = 120.0
    extract: float = 600.0
    load: float = 180.0
    propose: float = 90.0


_DEADLINES = Deadlines()


class SearchFailed(Exception):
    """The search of a task failed, crashed or hung; the text says how. Another task may be taken up.

    `killed`: its process was ended by SIGKILL, which is not its own doing.
    """

    def __init__(self, text: str, *, killed: bool = False) -> None:
        super().__init__(text)
        self.killed = killed


class NoSchedule(SearchFailed):
    """No schedule rule fits the function of a task; asking again is of no use."""


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

    def extract(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        precision: str,
        *,
        calibration: Path | None = None,
        like: Path | None = None,
    ) -> ModelTasks:
        """Extract the model's tasks.

        `calibration` and `like` are as in `honed.tuner.compiler.compile.CompileRequest`. Raises ModelRefused
        as compiling does, Internal where the child breaks.
        """
        call = Extract(
            path=path.absolute(),
            shapes=dict(shapes),
            precision=precision,
            calibration=calibration and calibration.absolute(),
            existing_build=like and like.absolute(),
        )
        return self._found(call)

    def adopt(self, func: str, name: str, outputs: int) -> ModelTasks:
        """Adopt one function, as TVM's JSON text, as the only task, run once; raises as `extract` does."""
        return self._found(Adopt(func=func, name=name, outputs=outputs))

    def _found(self, call: Call[ModelTasks]) -> ModelTasks:
        """Return the answer; ask once more where a signal from elsewhere ended the child."""
        for last in (False, True):
            try:
                return self._ask(call, self._deadlines.extract)
            except SearchFailed as broke:
                if last or not broke.killed:
                    text = f"the compiler broke while it extracted the model's tasks: {broke}"
                    raise Internal(text) from broke
        raise AssertionError("the loop above returns or raises")

    def load(self, task: TuningTask) -> LoadedTask:
        """Take up a task. Raises SearchFailed, as all below do."""
        return self._ask(LoadTask(task=task), self._deadlines.load)

    def default(self, task: TuningTask, following: Sequence[TuningTask], *, settle: bool) -> DefaultSchedule:
        """Take up a task and make its default schedule; the first of the tasks that follow are begun.

        With `settle` nothing goes on being made after the answer.
        """
        following = following[: self._threads - settle]
        call = MakeDefault(task=task, following=tuple(following), settle=settle)
        return self._ask(call, self._deadlines.load + self._deadlines.propose)

    def begin(
        self, task: TuningTask, known: Sequence[tuple[str, float | None]], related: Sequence[str], round_: int
    ) -> None:
        """Have a batch of a loaded task made; `collect` gives it, and nothing else may be asked before.

        `known` are traces with their seconds (None: refused), `related` the best of other tasks.
        """
        call = Propose(task=task, known=tuple(known), related=tuple(related), round=round_)
        self._started().begin(call)

    def collect(self) -> Proposed:
        """Wait for the batch that `begin` requested, and return it."""
        proposed = self._answered(lambda child: child.answer(Propose, self._deadlines.propose))
        if proposed is None:
            raise NoSchedule("no schedule rule fits the function")
        return proposed

    def replay(self, task: str, traces: Sequence[str]) -> Sequence[ProposedCandidate]:
        """Return candidates of a loaded task with the schedules of `traces` that fit."""
        return self._ask(Replay(task=task, traces=tuple(traces)), self._deadlines.propose)

    def learn(self, task: str, results: Mapping[str, float | None]) -> Ranking | None:
        """Tell what a batch of a task took; gives how well it was ranked, where that can be said."""
        if self._child is None:
            return None  # Its successor is told from the records
        return self._ask(UpdateCostModel(task=task, results=dict(results)), self._deadlines.propose)

    def _ask(self, call: Call[R], seconds: float) -> R:
        return self._answered(lambda child: child.call(call, seconds=seconds))

    def _answered(self, ask: Callable[[RpcChild], R]) -> R:
        try:
            return ask(self._started())
        except ChildCrashed as ended:
            self._child = None
            raise SearchFailed(f"the compiler ended: {ended}", killed=ended.death.killed) from ended
        except ModelRefused:
            raise
        except HonedError as error:
            raise SearchFailed(str(error)) from error

    def _started(self) -> RpcChild:
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

    A file that fell back to default rules is refused, too: these schedules were what was wanted.
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
    """The searching child as a session asks it: for the next batch while one is measured.

    Not for several threads.
    """

    def __init__(
        self,
        search: SearchChild,
        records: kept.Records,
        setup: kept.MeasurementSetup,
        *,
        ahead: bool,
        hints: int = kept.HINTS_PER_TASK,
    ) -> None:
        """With `ahead`, batches are made while others are measured.

        Of a task so many `hints` of a hub may be tried in a day.
        """
        self.search = search
        self.seconds = 0.0  # Waited for it so far
        self._records = records
        self._setup = setup
        self._ahead = ahead
        self._hints = hints
        self._begun: TaskProgress | None = None  # That a batch is being made for
        self._made: dict[str, Proposed] = {}  # By task

    def default(self, task: TuningTask, following: Sequence[TuningTask]) -> DefaultSchedule:
        """Take up a task, with its default schedule; raises SearchFailed, as all below do.

        Those of the tasks that follow are made beside it, and beside what comes next where that is allowed.
        """
        with self._waiting():
            return self.search.default(task, following, settle=not self._ahead)

    def hinted(self, task: TuningTask) -> bool:
        """Return whether a hub's records have something to try for a task."""
        return bool(self._records.hints(task.key, self._setup, self._hints))

    def next(self, progress: TaskProgress) -> Proposed:
        """Return the next batch of a task.

        Where there are schedules that were best on others' boards, drivers or compilers, these come first.
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
        """Have the next batch of a task made beside what follows, until `settle`."""
        if not self._ahead or progress is None or progress.task.key in self._made:
            return
        stale = self._records.stale(progress.task.key, self._setup) or self.hinted(progress.task)
        if progress.rounds == 0 and stale:
            return
        with suppress(SearchFailed):  # Shows when it is asked for
            self._begin(progress)
            self._begun = progress

    def settle(self) -> None:
        """Wait for what was begun. Where that broke, it is asked for again in its turn, and breaks then."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with suppress(SearchFailed), self._waiting():
                self._made[begun.task.key] = self.search.collect()

    def learn(self, task: TuningTask, results: Mapping[str, float | None]) -> Ranking | None:
        """Tell what a batch took; gives how well it had been ranked, where that can be said."""
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
        loaded = self.search.load(progress.task)
        entries += self.search.replay(key, [c.trace for c in stale]) if stale else []
        if not entries:
            return None
        return Proposed(loaded=loaded, entries=tuple(entries), way=SearchStrategy.REVALIDATED, last=False)

    def _hinted(self, task: TuningTask) -> list[ProposedCandidate]:
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
            new = kept.NewCandidate(
                workload=task.key, setup=self._setup, trace=hint.trace, way=SearchStrategy.REVALIDATED
            )
            with suppress(kept.InQuarantine, AlreadyExists):
                self._records.refuse(new, found[0].refused if found else why)
        return entries

    def _begin(self, progress: TaskProgress) -> None:
        task = progress.task
        known = self._known(task.key) if self.search.load(task).fresh else []
        related: list[str] = []
        if progress.rounds == 0:  # The best of all other tasks: the child finds out which of them are kin
            related = [c.trace for c in self._records.distil(self._setup) if c.workload != task.key]
        self.search.begin(task, known, related, progress.rounds)

    def _known(self, key: str) -> list[tuple[str, float | None]]:
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
