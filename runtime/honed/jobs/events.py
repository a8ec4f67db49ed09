"""The events of `python -m honed.tuner`: JSON maps, one a line, whose `event` names the kind.

A job reports news while it works, then one last event: its result, or an error. Times are in microseconds if
the name ends in `us`, else in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from honed.protocol import strict
from honed.protocol.errors import HonedError, MissingFiles, ModelRefused, error_from_map
from honed.protocol.params import TuningFigures
from honed.protocol.strict import abbreviate
from honed.protocol.values import OptimisationCheck

_MAX_TEXT = 1000  # Characters of a stage's text that are kept


class NoEvent(ValueError):
    """Raised when a line or map is no event; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Progress: `fraction` of the whole is done, 0 to 1."""

    stage: str
    fraction: float
    text: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", min(1.0, max(0.0, self.fraction)))
        object.__setattr__(self, "text", self.text[:_MAX_TEXT])


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A fact for the user."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """The state of a task. `filtered` counts candidates refused before they ran, `failures` those after."""

    task: str
    name: str
    weight: int  # Number of runs in one inference
    flops: int
    bytes: int
    roofline_us: float
    default_us: float | None
    best_us: float | None
    gflops: float | None  # Rate per second
    roofline_share: float | None
    trials: int
    filtered: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # Counts by outcome
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated time of one inference, with default schedules and now."""

    before_us: float
    now_us: float


FusionChoice = Literal["joined", "apart"]  # Kernels for the same work: one, or several in a chain


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRow:
    """The choice between one kernel and several for the same work.

    Times are of the best known schedules, including launches; None if one was not timed.
    """

    name: str
    joined: str  # Task of the one kernel
    apart: tuple[str, ...]  # Tasks of the several kernels
    calls: int  # Number in one inference
    taken: FusionChoice
    joined_us: float | None
    apart_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """The tasks of a model, the costliest first; `forms` are choices between alternative kernels."""

    tasks: tuple[TaskRow, ...]
    model: Estimate
    forms: tuple[FusionRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksFound(TaskTable):
    """The search began; every default schedule was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds by the activity waited for; activity in parallel is not counted twice."""

    search: float = 0.0  # Proposing, lowering and learning
    build: float = 0.0  # The driver's compiler, and the first launch
    check: float = 0.0  # Runs on other inputs, comparisons, the kernel log
    measure: float = 0.0  # Timing

    def __add__(self, other: Spent) -> Spent:
        return Spent(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def round_times(self) -> Spent:
        """Return the times rounded to milliseconds."""
        return Spent(**{f.name: round(getattr(self, f.name), 3) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The quality of a batch's ranking, made before it was measured."""

    correlation: float  # Spearman's, of predicted scores and measured speed; nan for a batch of equals
    best_rank: int  # Predicted rank of the batch's fastest; 1 is first
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(TaskTable):
    """A batch of a task's candidates was measured; `way` is the search strategy that proposed it."""

    round: int
    task: str
    way: str
    spent: Spent
    ranking: Ranking | None
    trials: int  # Trials of all rounds
    seconds: float
    seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate ran. `us` is its time if it was right, `best_us` the task's best now."""

    task: str
    outcome: str
    reason: str
    us: float | None
    best_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The totals of all tuning so far."""

    tuning: TuningFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class OfTask:
    """The base of events of one task, with a reason."""

    task: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered(OfTask):
    """A candidate was refused before it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCrashed(OfTask):
    """The search of a task crashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCondemned(OfTask):
    """A candidate that had been measured as right turned out to have faulted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of jobs that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPart:
    """A partition of a file that `engine` ("gpu", "cpu") would run: nodes, and their estimated operations.

    `why` lists the reasons against compiling it. If `sized`, it would be compiled for the sizes that it
    observes, which depend on the data.
    """

    engine: str
    nodes: int
    flops: int
    why: tuple[str, ...] = ()
    sized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The partitions of a file, in order, or the `reasons` that nothing of it is compiled.

    `inputs` and `outputs` are described as in the file. `cpu_engine`: it is installed, so that what cannot be
    compiled is served, too.
    """

    parts: tuple[FittedPart, ...]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nbytes: int  # Size of the model, its data included
    cpu_engine: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofReport:
    """The verification of a compiled model; errors and tolerances by output.

    `device` is None if the outputs were not compared: then the service compares them when it adds the model.
    """

    reference: str
    probes: int
    device: str | None
    error: dict[str, float]
    tolerance: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileDone:
    """A compiled file was written; `fell_back` is the reason if only default rules were used, else ""."""

    output: str
    sha256: str  # SHA-256 of the source
    precision: str
    why: str  # Reason for the precision
    notes: tuple[str, ...]
    fell_back: str = ""
    kernels: int
    launches: int
    seconds: float
    proof: ProofReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned(TaskTable):
    """A search ended. `output` is the tuned file, None if nothing faster was found; counts are of tasks.

    `before_us` and `after_us` are times of an inference, measured in turns; None if not measured.
    """

    output: str | None
    trials: int
    seconds: float
    tuned: int
    skipped: int
    lost: int
    failures: dict[str, int]
    spent: Spent
    before_us: float | None
    after_us: float | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A demo model was written."""

    output: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """`count` records were written."""

    output: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Records were imported: `count` are new, `merged` were present; `refused` has the reasons for others."""

    count: int
    merged: int
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A model's estimated latency at one time, after `trials` trials of all runs."""

    time: float  # Seconds since 1970
    us: float
    trials: int
    what: str = "estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedVersion:
    """A version that tuning compiled, and its measured time."""

    version: int
    why: str
    us: float | None
    time: float  # Seconds since 1970
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The results of tuning a model over time."""

    points: tuple[Point, ...]
    versions: tuple[TunedVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A candidate that is never run again on its device."""

    candidate: str
    task: str
    name: str
    outcome: str | None
    reason: str
    story: str | None
    time: float  # Seconds since 1970
    device: str
    driver_version: str
    measured_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Every candidate in quarantine, the oldest first."""

    faults: tuple[Quarantined, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTask:
    """The quality of a prior for a task that it was not trained on.

    `prior` is the best recorded time over that of its pick, 1 for the best. `without` is the best recorded
    time over that of the default `rule`, or of a random candidate on average if the rule was not recorded.
    """

    task: str
    candidates: int
    correlation: float  # Spearman's correlation of predicted scores and speed; 0 if all are equal
    prior: float
    without: float
    rule: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A prior was learned from `candidates` candidates; `output` is None if it is no better than none.

    `prior`, `without` and `correlation` are means over the tasks held out; `left_out` counts records by
    reason.
    """

    output: str | None
    family: str
    tasks: tuple[LearnedTask, ...]
    candidates: int
    left_out: dict[str, int]
    prior: float
    without: float
    correlation: float


News = Stage | Note | TasksFound | Round | Trial | Totals | Filtered | SearchCrashed | CandidateCondemned
Result = (
    Done | Fitted | OptimisationCheck | CompileDone | Tuned | Written | Exported | Imported | History | Faults
    | Learned
)  # fmt: skip
R = TypeVar("R", bound=Result)
_NAMES: dict[type, str] = {  # Names of events on the wire; all other results are "done"
    Stage: "stage",
    Note: "note",
    TasksFound: "tasks",
    Round: "round",
    Trial: "trial",
    Totals: "totals",
    Filtered: "filtered",
    SearchCrashed: "broke",
    CandidateCondemned: "condemned",
    History: "history",
    Faults: "faults",
}
_NEWS: dict[str, type[News]] = {_NAMES[kind]: kind for kind in get_args(News)}


def to_map(event: News | Result | HonedError) -> dict[str, Any]:
    """Return an event as its map on the wire."""
    if isinstance(event, ModelRefused):
        files = {"external_data": list(event.files)} if isinstance(event, MissingFiles) else {}
        return {"event": "refused", "message": str(event), "reasons": list(event.reasons), **files}
    if isinstance(event, HonedError):
        return {"event": "error", "code": event.code, "message": str(event)}
    return {"event": _NAMES.get(type(event), "done"), **strict.to_plain(event)}


def from_map(plain: object, result: type[R]) -> News | R | HonedError:
    """Return the event that a map describes, for a job whose result is of class `result`.

    Raises NoEvent for a map that describes none. Unknown fields are ignored.
    """
    if not isinstance(plain, Mapping) or not isinstance(plain.get("event"), str):
        raise NoEvent(f"{abbreviate(plain)} names no event")
    name = plain["event"]
    if name in ("refused", "error"):
        return _error(plain)
    kind = result if name == _NAMES.get(result, "done") else _NEWS.get(name)
    if kind is None:
        raise NoEvent(f"{abbreviate(name)} is no event of this job")
    fields = {key: value for key, value in plain.items() if key != "event"}
    try:
        return strict.from_plain(kind, fields, where=name, unknown_ignored=True)
    except strict.SchemaError as error:
        raise NoEvent(str(error)) from error


def parse(line: bytes, result: type[R]) -> News | R | HonedError:
    """Return the event that a line of JSON describes; `result` and errors are those of `from_map`."""
    try:
        return from_map(json.loads(line), result)
    except NoEvent:
        raise
    except (ValueError, RecursionError) as error:
        raise NoEvent(f"{line[:80]!r} is no JSON") from error


def _error(plain: Mapping[str, Any]) -> HonedError:
    fields = {"message": "the compiler gave no reason", **plain}
    if plain["event"] == "refused":
        fields |= {"code": ModelRefused.code, "type": "MissingFiles" if plain.get("external_data") else None}
    return error_from_map(fields)
