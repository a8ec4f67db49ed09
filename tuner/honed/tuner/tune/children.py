"""The children that have TVM in a session's place: the searching child, and one that compiles what was found.

What the searching child does are methods of its parent's hold on it; its death is an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.jobs.commands import Compile, Died, do
from honed.jobs.events import Ranking
from honed.machine.children import python
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import DeviceError, HonedError, Internal, ModelRefused
from honed.protocol.strict import from_plain, to_plain
from honed.runtime.origin import Way
from honed.tuner.measure import codec
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.measure.process import DriverChild, Ended

from .scratch import scratch
from .task import Found, TuningTask

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


class SearchBroke(Exception):
    """The search of a task failed, crashed or hung; the text says how. Another task may be taken up.

    `killed`: its process was ended by SIGKILL, which is not its own doing.
    """

    def __init__(self, text: str, *, killed: bool = False) -> None:
        super().__init__(text)
        self.killed = killed


class NoSchedule(SearchBroke):
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
        self._batch = batch
        self._answers = answers
        self._threads = threads
        self._deadlines = deadlines
        self._profile = profile
        self._cost_model = cost_model
        self._seed = seed
        self._command = tuple(command)
        self._folder = scratch("honed-search-")
        self._child: DriverChild | None = None
        self._held: set[str] = set()  # tasks that the child has loaded

    def __enter__(self) -> SearchChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and remove its files."""
        self._stop()
        self._folder.cleanup()

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return self._child.pid if self._child else None

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

        `calibration` and `like` are as in `honed.tuner.compile.Request`. Raises ModelRefused as compiling
        does, Internal where the child breaks.
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
        except SearchBroke as broke:
            raise Internal(f"the compiler broke while it extracted the model's tasks: {broke}") from broke
        return from_plain(Found, answer, where="what was extracted")

    def load(self, task: TuningTask) -> LoadedTask:
        """Take up a task. Raises SearchBroke, as all below do."""
        answer = self._ask({"do": "load", **_named(task)}, self._deadlines.load)
        self._held.add(task.key)
        return _loaded(answer)

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
        self._held.add(task.key)
        candidate = codec.candidate_from_plain(answer["candidate"])
        return DefaultSchedule(loaded=_loaded(answer), candidate=candidate)

    def begin(
        self, task: TuningTask, known: Sequence[tuple[str, float | None]], kin: Sequence[str], round_: int
    ) -> None:
        """Have a batch of a task made; `collect` gives it, and nothing else may be asked before.

        `known` are traces with their seconds (None: refused), `kin` the best of other tasks. Waits only where
        the task must be loaded first.
        """
        message = {
            "do": "propose",
            **_named(task),
            "known": [list(k) for k in known],
            "kin": list(kin),
            "round": round_,
        }
        if self._child is None or task.key not in self._held:
            self.load(task)
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
        """Tell what a batch of a loaded task took; gives how well it was ranked, where that can be said."""
        message = {"do": "learn", "task": task, "results": dict(results)}
        plain = self._ask(message, self._deadlines.propose)["ranking"]
        return None if plain is None else from_plain(Ranking, plain, where="ranking")

    def _twice(self, message: Mapping[str, object], seconds: float) -> codec.Message:
        """Ask, and once again where the child was ended by a signal from elsewhere."""
        try:
            return self._ask(message, seconds)
        except SearchBroke as broke:
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
            raise SearchBroke(f"the compiler ended: {ended}", killed=ended.death.killed) from ended
        if "refused" in answer:
            raise ModelRefused(str(answer["refused"]), tuple(answer["reasons"]))
        if "failed" in answer:
            raise SearchBroke(str(answer["failed"]))
        return answer

    def _started(self) -> DriverChild:
        """The child, started where there is none."""
        if self._child is not None:
            return self._child
        folder = Path(self._folder.name)
        self._held.clear()
        self._child = DriverChild(folder / "search.log", self._command)
        message = {
            "do": "start",
            "profile": to_plain(self._profile),
            "folder": str(folder),
            "cost_model": str(self._cost_model),
            "seed": self._seed,
            "threads": self._threads,
            "batch": self._batch,
            "answers": self._answers,
        }
        started = self._child
        try:
            self._answered(lambda child: child.ask(message, self._deadlines.start))
        except SearchBroke:
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
