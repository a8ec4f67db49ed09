"""The calls of the searching child and their results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from honed.jobs.events import Ranking
from honed.machine.profile import DeviceProfile
from honed.process.rpc import Call
from honed.runtime.compiled.model import SearchStrategy
from honed.tuner.measure.candidate import Candidate, Workload

from .task import ModelTasks, TuningTask


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
    calibration: Path | None
    existing_build: Path | None


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
