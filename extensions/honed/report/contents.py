"""Gathers a report's contents from the service, and derives figures from them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from honed.daemon.observe.faults import AttributedFault, attribute_faults, kernel_log, ours
from honed.jobs.commands import Job, ListFaults, ShowHistory
from honed.jobs.events import Faults, History, NoEvent, Quarantined, R, from_map
from honed.protocol.errors import HonedError, NotFound
from honed.protocol.methods import (
    METRICS,
    MODEL_HISTORY,
    MODEL_SHOW,
    REPOSITORY_INDEX,
    SERVER_STATUS,
    TUNER_RUN,
)
from honed.protocol.params import HistoryParams, ModelParams, TunerRunParams
from honed.protocol.results import IndexedModel, ModelHistory, ModelShown
from honed.protocol.service import KernelLog, Metrics, ModelFigures, Status
from honed.runtime.client import Client

_RECORDED = "what tuning recorded, and candidates in quarantine,"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedVariant:
    """A shape variant of a model."""

    figures: ModelFigures
    history: ModelHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedModel:
    """A model; `history` is of its versions, `tuned` of its tuning, None if that is not available."""

    listed: IndexedModel
    shown: ModelShown
    history: ModelHistory
    figures: ModelFigures
    variants: tuple[ReportedVariant, ...]
    tuned: History | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFaults:
    """The faults; if they are not available, `quarantined` is None or `log_reason` a sentence."""

    quarantined: tuple[Quarantined, ...] | None
    log: tuple[AttributedFault, ...]
    log_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The contents of the page; `made` in seconds since 1970. `notes` say what is missing, and why."""

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
    """A task's share of all models' recent time; `name` is None for time outside of tasks."""

    model: str
    name: str | None
    schedule: str | None
    launches: int
    seconds: float
    share: float


def gain(history: ModelHistory) -> float | None:
    """Return how many times as fast tuning made the version served; None if nothing was compared.

    It is the product of each version's gain over the one before, measured side by side: times of different
    days differ by the machine's other work.
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
    """Return the version that was served before this one's first deployment; 0 if unknown."""
    numbers = [span.number for span in history.deployments]
    first = numbers.index(number) if number in numbers else 0
    return numbers[first - 1] if first else 0


def median_in_service(history: ModelHistory, number: int) -> float | None:
    """Return the time of a version's inferences in service, in microseconds: the median over its spans."""
    times = [point.us for point in history.latency if point.version == number]
    return median(times) if times else None


def task_shares(models: Sequence[ReportedModel]) -> list[TaskShare]:
    """Return the tasks of all models and the time of models outside of tasks, the longest first."""
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


def gather(
    client: Client, *, records: bool = True, progress: Callable[[str, float], None] = lambda _, __: None
) -> Report:
    """Return a report of the service that `client` asks.

    Calls `progress` with each model, and the share that is done. Only users who may change models get the
    records of tuning; without that right, or without a tuner, the notes say so. Without `records` they are
    not requested: a process of the service reads them for each model. Raises HonedError if the service does
    not answer.
    """
    status, metrics = client.ask(SERVER_STATUS), client.ask(METRICS)
    index = client.ask(REPOSITORY_INDEX).models
    recorded = _Records(client, "" if records else f"{_RECORDED} are left out here")
    models = tuple(_models(client, index, metrics, recorded, progress))
    quarantine, log = recorded.faults()
    log = log or kernel_log()
    quarantined = quarantine.faults if quarantine is not None else None
    system = os.uname()
    return Report(
        made=time.time(),
        host=system.nodename,
        system=f"{system.sysname} {system.release}, {system.machine}",
        status=status,
        metrics=metrics,
        models=models,
        faults=ReportedFaults(
            quarantined=quarantined,
            log=attribute_faults(log, ours(metrics, status), quarantined or ()),
            log_reason=log.reason,
        ),
        notes=(recorded.missing,) if recorded.missing else (),
    )


def _models(
    client: Client,
    index: Sequence[IndexedModel],
    metrics: Metrics,
    records: _Records,
    progress: Callable[[str, float], None],
) -> Iterator[ReportedModel]:
    """Yield the models that still exist when they are requested."""
    figures = {each.name: each for each in metrics.models}
    models = [listed for listed in index if listed.name in figures]
    for number, listed in enumerate(models):
        progress(listed.name, number / len(models))
        try:
            yield _model(client, listed, figures[listed.name], metrics.variants, records)
        except NotFound:  # The model was removed meanwhile
            continue


def _model(
    client: Client,
    listed: IndexedModel,
    figures: ModelFigures,
    variants: tuple[ModelFigures, ...],
    records: _Records,
) -> ReportedModel:
    shown = client.ask(MODEL_SHOW, ModelParams(name=listed.name))
    names = {variant.name for variant in shown.variants}
    return ReportedModel(
        listed=listed,
        shown=shown,
        history=client.ask(MODEL_HISTORY, HistoryParams(name=listed.name)),
        figures=figures,
        variants=tuple(_variants(client, [each for each in variants if each.name in names])),
        tuned=records.history(listed.name) if shown.compiler else None,
    )


def _variants(client: Client, variants: Iterable[ModelFigures]) -> Iterator[ReportedVariant]:
    """Yield the variants that still exist when they are requested."""
    for figures in variants:
        with suppress(NotFound):
            history = client.ask(MODEL_HISTORY, HistoryParams(name=figures.name))
            yield ReportedVariant(figures=figures, history=history)


@dataclass(slots=True)
class _Records:
    """The records of tuning, requested until the service refuses; `missing` says why there are none."""

    client: Client
    missing: str

    def history(self, model: str) -> History | None:
        """Return the tuning of a model; None if it was not tuned, or is not available."""
        return self._ask(ShowHistory, TunerRunParams(command="history", model=model))[0]

    def faults(self) -> tuple[Faults | None, KernelLog | None]:
        """Return the candidates in quarantine, and the kernel log as the service reads it."""
        return self._ask(ListFaults, TunerRunParams(command="faults"))

    def _ask(self, job: type[Job[R]], params: TunerRunParams) -> tuple[R | None, KernelLog | None]:
        if self.missing:
            return None, None
        try:
            plain, _ = self.client.run_tuner(params)
            answered = TUNER_RUN.result_of(plain)
            event = from_map(answered.event, job.result())
        except NotFound:  # The model was not tuned
            return None, None
        except (HonedError, NoEvent) as error:
            self.missing = f"{_RECORDED} are not told: {error}"
            return None, None
        return (event if isinstance(event, job.result()) else None), answered.kernel_log
