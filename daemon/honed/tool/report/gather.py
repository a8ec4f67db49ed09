"""Asks the service for what a report tells."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from honed.daemon.observe.faults import blamed, kernel_log, ours
from honed.jobs.commands import Job, ListFaults, ShowHistory
from honed.jobs.events import Faults, History, NoEvent, R, from_map
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
from honed.protocol.results import IndexedModel
from honed.protocol.service import KernelLog, Metrics, ModelFigures
from honed.runtime.client import Client

from .contents import Report, ReportedFaults, ReportedModel, ReportedVariant

_RECORDED = "what tuning recorded, and candidates in quarantine,"


def gather(
    client: Client, *, records: bool = True, told: Callable[[str, float], None] = lambda _, __: None
) -> Report:
    """A report of the service that `client` asks; `told` each model meanwhile, and the share that is done.

    What the records of tuning have is for who may change models; without that right, or without a tuner, the
    notes say so. Without `records` they are not asked for: a process of the service reads them for each
    model. Raises HonedError where the service does not answer.
    """
    status, metrics = client.ask(SERVER_STATUS), client.ask(METRICS)
    index = client.ask(REPOSITORY_INDEX).models
    recorded = _Records(client, "" if records else f"{_RECORDED} are left out here")
    models = tuple(_models(client, index, metrics, recorded, told))
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
            log=blamed(log, ours(metrics, status), quarantined or ()),
            log_reason=log.reason,
        ),
        notes=(recorded.missing,) if recorded.missing else (),
    )


def _models(
    client: Client,
    index: Sequence[IndexedModel],
    metrics: Metrics,
    records: _Records,
    told: Callable[[str, float], None],
) -> Iterator[ReportedModel]:
    """Those that are there while they are asked for."""
    figures = {each.name: each for each in metrics.models}
    models = [listed for listed in index if listed.name in figures]
    for number, listed in enumerate(models):
        told(listed.name, number / len(models))
        try:
            yield _model(client, listed, figures[listed.name], metrics.variants, records)
        except NotFound:  # it was removed since
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
    """Those that are there while they are asked for."""
    for figures in variants:
        with suppress(NotFound):
            history = client.ask(MODEL_HISTORY, HistoryParams(name=figures.name))
            yield ReportedVariant(figures=figures, history=history)


@dataclass(slots=True)
class _Records:
    """What tuning recorded, asked for until it is refused; `missing` says why it is not told."""

    client: Client
    missing: str

    def history(self, model: str) -> History | None:
        """The tuning of a model."""
        return self._asked(ShowHistory, TunerRunParams(command="history", model=model))[0]

    def faults(self) -> tuple[Faults | None, KernelLog | None]:
        """Candidates in quarantine, and the kernel log as the service reads it."""
        return self._asked(ListFaults, TunerRunParams(command="faults"))

    def _asked(self, job: type[Job[R]], params: TunerRunParams) -> tuple[R | None, KernelLog | None]:
        if self.missing:
            return None, None
        try:
            plain, _ = self.client.run_tuner(params)
            answered = TUNER_RUN.result_of(plain)
            event = from_map(answered.event, job.result())
        except NotFound:  # it was not tuned
            return None, None
        except (HonedError, NoEvent) as error:
            self.missing = f"{_RECORDED} are not told: {error}"
            return None, None
        return (event if isinstance(event, job.result()) else None), answered.kernel_log
