"""The parent's hold on the searching child: operations as methods, its death as an exception."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from honed.runtime.errors import Internal, ModelRefused
from honed.runtime.profile import DeviceProfile
from honed.runtime.strict import from_plain, to_plain
from honed.tuner.measure import codec
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.measure.process import Child, Ended

from .scratch import scratch
from .task import Task

BATCH = 16  # candidates of a proposal
COMMAND = (sys.executable, "-P", "-m", "honed.tuner.tune.searcher")
Found = tuple[list[tuple[Task, int]], list[Task]]  # tasks with their outputs, and what cannot be tuned


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


@dataclass(frozen=True, slots=True)
class Entry:
    """A proposed candidate; `candidate` is None where lowering refused it, and `refused` says why."""

    id: str
    trace: str
    score: float | None
    candidate: Candidate | None
    refused: str


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
    ) -> None:
        """`batch` is how many candidates it proposes at once. Without `answers` its workloads have no sets of
        inputs. `command` is another child in tests.
        """
        self._batch = batch
        self._answers = answers
        self._deadlines = deadlines
        self._profile = profile
        self._cost_model = cost_model
        self._seed = seed
        self._command = tuple(command)
        self._folder = scratch("honed-search-")
        self._child: Child | None = None

    def __enter__(self) -> SearchChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child and remove its files."""
        self._stop()
        self._folder.cleanup()

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return self._child.pid if self._child else None

    def extract(self, path: Path, shapes: Mapping[str, tuple[int, ...]], precision: str) -> Found:
        """The model's tasks, each with its number of outputs, and what cannot be tuned.

        Raises ModelRefused as compiling does, Internal where the child breaks.
        """
        message = {
            "do": "extract",
            "path": str(path.absolute()),
            "shapes": {name: list(shape) for name, shape in shapes.items()},
            "precision": precision,
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
        tasks = []
        for plain in answer["tasks"]:
            outputs = int(plain.pop("outputs"))
            tasks.append((from_plain(Task, plain, where="task"), outputs))
        return tasks, [from_plain(Task, plain, where="task") for plain in answer["opaque"]]

    def load(self, task: Task, outputs: int) -> Workload:
        """Take up a task. Raises SearchBroke, as all below do."""
        message = {
            "do": "load",
            "task": task.key,
            "outputs": outputs,
            "flops": task.flops,
            "bytes": task.bytes,
        }
        return codec.workload_from_plain(self._ask(message, self._deadlines.load)["workload"])

    def default(self) -> Candidate:
        """The loaded task's default schedule."""
        return codec.candidate_from_plain(self._ask({"do": "default"}, self._deadlines.propose)["candidate"])

    def propose(self, known: Sequence[tuple[str, float | None]], round_: int) -> list[Entry]:
        """A batch for the loaded task; `known` are traces with their seconds (None: refused)."""
        message = {"do": "propose", "known": [list(k) for k in known], "round": round_}
        answer = self._ask(message, self._deadlines.propose)
        if answer["why"]:
            raise SearchBroke(str(answer["why"]))
        return [_entry(plain) for plain in answer["candidates"]]

    def replay(self, traces: Sequence[str]) -> list[Entry]:
        """Candidates of the loaded task with the schedules of `traces`, less those that do not fit."""
        answer = self._ask({"do": "replay", "traces": list(traces)}, self._deadlines.propose)
        return [_entry(plain) for plain in answer["candidates"]]

    def learn(self, results: Mapping[str, float | None]) -> dict[str, Any] | None:
        """Tell what a batch took; gives how well it had been ranked, where that can be said."""
        ranking: dict[str, Any] | None = self._ask(
            {"do": "learn", "results": dict(results)}, self._deadlines.propose
        )["ranking"]
        return ranking

    def _twice(self, message: Mapping[str, object], seconds: float) -> codec.Message:
        """Ask, and once again where the child was ended by a signal from elsewhere."""
        try:
            return self._ask(message, seconds)
        except SearchBroke as broke:
            if not broke.killed:
                raise
            return self._ask(message, seconds)

    def _ask(self, message: Mapping[str, object], seconds: float) -> codec.Message:
        try:
            if self._child is None:
                self._start()
            assert self._child is not None
            answer = self._child.ask(message, seconds)
        except Ended as ended:
            self._child = None
            killed = ended.how == "signal SIGKILL" and not ended.late
            raise SearchBroke(f"the compiler ended: {ended}", killed=killed) from ended
        if "refused" in answer:
            raise ModelRefused(str(answer["refused"]), tuple(answer["reasons"]))
        if "failed" in answer:
            raise SearchBroke(str(answer["failed"]))
        return answer

    def _start(self) -> None:
        folder = Path(self._folder.name)
        self._child = Child(folder / "search.log", self._command)
        answer = self._child.ask(
            {
                "do": "start",
                "profile": to_plain(self._profile),
                "folder": str(folder),
                "cost_model": str(self._cost_model),
                "seed": self._seed,
                "batch": self._batch,
                "answers": self._answers,
            },
            self._deadlines.start,
        )
        if "failed" in answer:
            self._stop()
            raise SearchBroke(f"the compiler cannot be started: {answer['failed']}")

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _entry(plain: Mapping[str, Any]) -> Entry:
    candidate = plain.get("candidate")
    return Entry(
        str(plain["id"]),
        str(plain["trace"]),
        plain["score"],
        None if candidate is None else codec.candidate_from_plain(candidate),
        str(plain.get("refused", "")),
    )
