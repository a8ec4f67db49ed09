"""What a report tells, as the service told it; and what follows from that. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from honed.daemon.observe.faults import BlamedFault
from honed.jobs.events import History, Quarantined
from honed.protocol.results import IndexedModel, ModelHistory, ModelShown
from honed.protocol.service import Metrics, ModelFigures, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedVariant:
    """A compiled form of a model for other shapes than its own."""

    figures: ModelFigures
    history: ModelHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedModel:
    """A model; `history` is of its versions, `tuned` of its tuning, None where that is not told."""

    listed: IndexedModel
    shown: ModelShown
    history: ModelHistory
    figures: ModelFigures
    variants: tuple[ReportedVariant, ...]
    tuned: History | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFaults:
    """What went wrong; `quarantined` is None, `log_reason` a sentence, where that cannot be told."""

    quarantined: tuple[Quarantined, ...] | None
    log: tuple[BlamedFault, ...]
    log_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it; `made` in seconds since 1970. `notes` say what is missing, and why."""

    made: float
    host: str
    system: str
    status: Status
    metrics: Metrics
    models: tuple[ReportedModel, ...]
    faults: ReportedFaults
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskShare:
    """A task's part of the time that all models took lately; `name` is None for time outside of tasks."""

    model: str
    name: str | None
    schedule: str | None
    launches: int
    seconds: float
    share: float


def gain(history: ModelHistory) -> float | None:
    """How many times as fast tuning made the version served; None where nothing was compared.

    The product of what each version won over the one before it, measured side by side: times of different
    days are of a machine that had other work.
    """
    versions = {version.number: version for version in history.versions}
    number, whole, seen = history.version, 1.0, set[int]()
    while (version := versions.get(number)) is not None and number not in seen:
        seen.add(number)
        if not version.old_us or not version.new_us:
            break
        whole *= version.old_us / version.new_us
        number = _before(history, number)
    return whole if len(seen) > 1 else None


def _before(history: ModelHistory, number: int) -> int:
    """The version that was served when this one first came; 0: none is known."""
    numbers = [span.number for span in history.stints]
    first = numbers.index(number) if number in numbers else 0
    return numbers[first - 1] if first else 0


def served_median(history: ModelHistory, number: int) -> float | None:
    """What inferences of a version took in service, in microseconds: the median over its spans of time."""
    times = [point.us for point in history.latency if point.version == number]
    return median(times) if times else None


def task_shares(models: Sequence[ReportedModel]) -> list[TaskShare]:
    """The tasks of all models and the time of models outside of tasks, the longest first."""
    whole = sum(model.figures.spent.seconds for model in models)
    if not whole > 0:
        return []
    found = [share for model in models for share in _of_model(model, whole) if share.seconds > 0]
    return sorted(found, key=lambda share: -share.seconds)


def _of_model(model: ReportedModel, whole: float) -> list[TaskShare]:
    spent, name = model.figures.spent, model.listed.name
    kernels = {kernel.task: kernel for kernel in model.shown.kernels if kernel.task}
    launches: dict[str, int] = {}
    for kernel in model.shown.kernels:
        launches[kernel.task] = launches.get(kernel.task, 0) + kernel.launches
    rest = spent.seconds - sum(spent.tasks.values())
    rows = [
        TaskShare(
            model=name,
            name=kernels[task].name if task in kernels else task,
            schedule=kernels[task].schedule if task in kernels else None,
            launches=launches.get(task, 0),
            seconds=seconds,
            share=seconds / whole,
        )
        for task, seconds in spent.tasks.items()
    ]
    outside = TaskShare(model=name, name=None, schedule=None, launches=0, seconds=rest, share=rest / whole)
    return [*rows, *([outside] if rest > 0.001 * whole else [])]
