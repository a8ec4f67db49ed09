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
from typing import Any

from honed.jobs.commands import Compile, Died, do
from honed.jobs.events import Ranking
from honed.machine.children import python
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import AlreadyExists, DeviceError, HonedError, Internal, ModelRefused
from honed.protocol.strict import from_plain, to_plain
from honed.runtime.compiled.model import Way
from honed.tuner import records as kept
from honed.tuner.measure import codec
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.measure.process import DriverChild, Ended
from honed.tuner.records.store import Owner
from honed.tuner.records.verdict import Stored

from .task import Found, TaskProgress, TuningTask

_OWNER = "owner"


def scratch(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A new temporary folder, once those of the same prefix have gone whose processes have ended."""
    sweep(Path(tempfile.gettempdir()), prefix)
    made = tempfile.TemporaryDirectory(prefix=prefix)
    (Path(made.name) / _OWNER).write_text(str(Owner.this_process()))
    return made


def sweep(place: Path, prefix: str) -> None:
    """Remove this user's folders in `place` that begin with `prefix` and whose process certainly ended."""
    for folder in place.glob(f"{prefix}*"):
        # Another process may be clearing the same away, and folders of others are none of ours.
        with suppress(OSError, ValueError):
            about = folder.lstat()
            ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
            if ours and Owner.parse((folder / _OWNER).read_text()).gone():
                shutil.rmtree(folder, ignore_errors=True)


BATCH = 16  # candidates of a proposal
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


@dataclass(frozen=True, slots=True)
class ProposedCandidate:
    """A proposed candidate; `candidate` is None where lowering refused it, and `refused` says why."""

    id: str
    trace: str
    score: float | None
    candidate: Candidate | None
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTask:
    """A task that was taken up; `fresh`: its search knows nothing of what was measured before."""

    workload: Workload
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSchedule:
    """A task that was taken up, with its default schedule."""

    loaded: LoadedTask
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A batch of a task. `way` is how it came to be, `last`: nothing beside the best is left to try."""

    loaded: LoadedTask
    entries: list[ProposedCandidate]
    way: Way
    last: bool


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
        """`batch` is how many candidates it proposes at once, `threads` how many a search may use. Without
        `answers` its workloads have no sets of inputs. `command` is another child in tests.
        """
        self._threads = threads
        self._deadlines = deadlines
        self._command = tuple(command)
        self._folder = scratch("honed-search-")
        self._opening = {
            "do": "start",
            "profile": to_plain(profile),
            "folder": self._folder.name,
            "cost_model": str(cost_model),
            "seed": seed,
            "threads": threads,
            "batch": batch,
            "answers": answers,
        }
        self._child: DriverChild | None = None

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
    ) -> Found:
        """The model's tasks.

        `calibration` and `like` are as in `honed.tuner.compiler.compile.CompileRequest`. Raises ModelRefused
        as compiling does, Internal where the child breaks.
        """
        message = {
            "do": "extract",
            "path": str(path.absolute()),
            "shapes": {name: list(shape) for name, shape in shapes.items()},
            "precision": precision,
            "calibration": _absolute(calibration),
            "like": _absolute(like),
        }
        return self._found(message)

    def adopt(self, func: str, name: str, outputs: int) -> Found:
        """One function as TVM's JSON text for the only task, run once; raises as `extract`."""
        return self._found({"do": "adopt", "func": func, "name": name, "outputs": outputs})

    def _found(self, message: Mapping[str, object]) -> Found:
        try:
            answer = self._twice(message, self._deadlines.extract)
        except SearchFailed as broke:
            raise Internal(f"the compiler broke while it extracted the model's tasks: {broke}") from broke
        return from_plain(Found, answer, where="what was extracted")

    def load(self, task: TuningTask) -> LoadedTask:
        """Take up a task. Raises SearchFailed, as all below do."""
        return _loaded(self._ask({"do": "load", **_named(task)}, self._deadlines.load))

    def default(self, task: TuningTask, following: Sequence[TuningTask], *, settle: bool) -> DefaultSchedule:
        """Take up a task and make its default schedule; the first of the tasks that follow are begun.

        With `settle` nothing goes on being made after the answer.
        """
        message = {
            "do": "default",
            **_named(task),
            "following": [_named(one) for one in following[: self._threads - settle]],
            "settle": settle,
        }
        answer = self._ask(message, self._deadlines.load + self._deadlines.propose)
        candidate = codec.candidate_from_plain(answer["candidate"])
        return DefaultSchedule(loaded=_loaded(answer), candidate=candidate)

    def begin(
        self, task: TuningTask, known: Sequence[tuple[str, float | None]], kin: Sequence[str], round_: int
    ) -> None:
        """Have a batch of a loaded task made; `collect` gives it, and nothing else may be asked before.

        `known` are traces with their seconds (None: refused), `kin` the best of other tasks.
        """
        message = {
            "do": "propose",
            **_named(task),
            "known": [list(k) for k in known],
            "kin": list(kin),
            "round": round_,
        }
        self._started().tell(message)

    def collect(self) -> Proposed:
        """The batch that `begin` had made; waits for it."""
        answer = self._answered(lambda child: child.answer(self._deadlines.propose))
        if not answer["fits"]:
            raise NoSchedule("no schedule rule fits the function")
        return Proposed(
            loaded=_loaded(answer),
            entries=[_entry(plain) for plain in answer["candidates"]],
            way=Way(answer["way"]),
            last=answer["last"],
        )

    def replay(self, task: str, traces: Sequence[str]) -> list[ProposedCandidate]:
        """Candidates of a loaded task with the schedules of `traces`, less those that do not fit."""
        message = {"do": "replay", "task": task, "traces": list(traces)}
        answer = self._ask(message, self._deadlines.propose)
        return [_entry(plain) for plain in answer["candidates"]]

    def learn(self, task: str, results: Mapping[str, float | None]) -> Ranking | None:
        """Tell what a batch of a task took; gives how well it was ranked, where that can be said."""
        if self._child is None:
            return None  # its successor is told from the records
        message = {"do": "learn", "task": task, "results": dict(results)}
        plain = self._ask(message, self._deadlines.propose)["ranking"]
        return None if plain is None else from_plain(Ranking, plain, where="ranking")

    def _twice(self, message: Mapping[str, object], seconds: float) -> codec.Message:
        """Ask, and once again where the child was ended by a signal from elsewhere."""
        try:
            return self._ask(message, seconds)
        except SearchFailed as broke:
            if not broke.killed:
                raise
            return self._ask(message, seconds)

    def _ask(self, message: Mapping[str, object], seconds: float) -> codec.Message:
        return self._answered(lambda child: child.ask(message, seconds))

    def _answered(self, ask: Callable[[DriverChild], codec.Message]) -> codec.Message:
        try:
            answer = ask(self._started())
        except Ended as ended:
            self._child = None
            raise SearchFailed(f"the compiler ended: {ended}", killed=ended.death.killed) from ended
        if "refused" in answer:
            raise ModelRefused(str(answer["refused"]), tuple(answer["reasons"]))
        if "failed" in answer:
            raise SearchFailed(str(answer["failed"]))
        return answer

    def _started(self) -> DriverChild:
        """The child, started where there is none."""
        if self._child is not None:
            return self._child
        started = self._child = DriverChild(Path(self._folder.name) / "search.log", self._command)
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


def _absolute(path: Path | None) -> str:
    return str(path.absolute()) if path is not None else ""


def _entry(plain: Mapping[str, Any]) -> ProposedCandidate:
    candidate = plain.get("candidate")
    return ProposedCandidate(
        str(plain["id"]),
        str(plain["trace"]),
        plain["score"],
        None if candidate is None else codec.candidate_from_plain(candidate),
        str(plain.get("refused", "")),
    )


def _named(task: TuningTask) -> dict[str, object]:
    return {"task": task.key, "outputs": task.outputs, "constants": list(task.constants)}


def _loaded(answer: Mapping[str, Any]) -> LoadedTask:
    return LoadedTask(workload=codec.workload_from_plain(answer["workload"]), fresh=answer["fresh"])


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
    except Died as died:
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
        self._begun: TaskProgress | None = None  # that a batch is being made for
        self._made: dict[str, Proposed] = {}  # by task

    def default(self, task: TuningTask, following: Sequence[TuningTask]) -> DefaultSchedule:
        """Take up a task, with its default schedule; raises SearchFailed, as all below do.

        Those of the tasks that follow are made beside it, and beside what comes next where that is allowed.
        """
        with self._waiting():
            return self.search.default(task, following, settle=not self._ahead)

    def hinted(self, task: TuningTask) -> bool:
        """Whether a hub's records have something to try for a task."""
        return bool(self._records.hints(task.key, self._setup, self._hints))

    def next(self, progress: TaskProgress) -> Proposed:
        """The next batch of a task: first of all what was best on others' boards, drivers or compilers."""
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
        with suppress(SearchFailed):  # shows when it is asked for
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
        return Proposed(loaded=loaded, entries=entries, way=Way.AGAIN, last=False) if entries else None

    def _hinted(self, task: TuningTask) -> list[ProposedCandidate]:
        """A hub's records, those that fit: one by one, so that what breaks the search is noted, and left."""
        entries = []
        for hint in self._records.hints(task.key, self._setup, self._hints):
            try:
                self.search.load(task)
                found, why = self.search.replay(task.key, [hint.trace]), "it does not fit the task"
            except SearchFailed as broke:
                found, why = [], str(broke)
            if found and found[0].candidate is not None:
                entries += found
                continue
            new = kept.NewCandidate(workload=task.key, setup=self._setup, trace=hint.trace, way=Way.AGAIN)
            with suppress(kept.InQuarantine, AlreadyExists):
                self._records.refuse(new, found[0].refused if found else why)
        return entries

    def _begin(self, progress: TaskProgress) -> None:
        task = progress.task
        known = self._known(task.key) if self.search.load(task).fresh else []
        kin: list[str] = []
        if progress.rounds == 0:  # the best of all other tasks: the child finds out which of them are kin
            kin = [c.trace for c in self._records.distil(self._setup) if c.workload != task.key]
        self.search.begin(task, known, kin, progress.rounds)

    def _known(self, key: str) -> list[tuple[str, float | None]]:
        """Traces measured before on this setup; those in quarantine come as refused."""
        return [
            (c.trace, c.timing.fair_s if c.outcome is Stored.RIGHT and c.timing else None)
            for c in self._records.history(key, self._setup)
        ]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began
