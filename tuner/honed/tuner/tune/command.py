"""The jobs that tune a model, and that list its tasks."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from honed.jobs import commands, events
from honed.protocol.errors import NotFound
from honed.protocol.strict import like
from honed.tuner.valhall.benches import marked
from honed.tuner.valhall.compiler import ROOT

from .opening import BenchChoice, OpenedSession
from .publishing import Publication, publish
from .session import Emit, SearchBudget, TuningSession
from .task import Found, TaskState

if TYPE_CHECKING:
    from honed.tuner.farm.joining import FarmChoice


def list_tasks(job: commands.Tasks, emit: Emit) -> events.Done:
    """Extract the tasks and time their default schedules; search nothing."""
    with _opened(job, emit) as run:
        run.session.run(_extraction(job, run), SearchBudget(trials=0))
    return events.Done()


def tune_model(job: commands.Tune, emit: Emit) -> events.Tuned:
    """Tune within the budget, compile with the best schedules, and compare."""
    with _stoppable() as stop, _opened(job, emit, job.seed) as run:
        stop.session = run.session
        if stop.asked:
            run.session.stop()
        run.session.run(_extraction(job, run), SearchBudget(trials=job.trials, seconds=job.seconds))
        run.search.close()
        if not (job.bench or job.farm):  # of no device that serves
            emit(events.Totals(tuning=run.records.figures()))
        return _told(run.session, publish(job, emit, run))


@dataclass(slots=True)
class _Stop:
    """Whether a signal asked to stop, and the session to tell."""

    asked: bool = False
    session: TuningSession | None = None

    def __call__(self, _number: int, _frame: object) -> None:
        self.asked = True
        if self.session is not None:
            self.session.stop()


@contextmanager
def _stoppable() -> Iterator[_Stop]:
    """SIGINT and SIGTERM end the search, not the run: what was found is used."""
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _opened(job: commands.Search[Any], emit: Emit, seed: int = 0) -> OpenedSession:
    name = job.name or job.file.stem
    return OpenedSession(
        marked(name, job.bench) if job.bench else name,
        device=job.device,
        records=job.records,
        cache_dir=job.cache_dir,
        seed=seed,
        emit=emit,
        hints=job.hints,
        bench=BenchChoice(job.bench, job.bench_root or ROOT) if job.bench else None,
        farm=_farm(job),
    )


def _farm(job: commands.Search[Any]) -> FarmChoice | None:
    if job.farm is None:
        return None
    try:
        from honed.tuner.farm.joining import FarmChoice
    except ModuleNotFoundError as error:
        raise NotFound(
            f"a farm needs {error.name}, which is not installed; install honed-farm (apt install honed-farm, "
            "or pip install 'honed[farm]')"
        ) from error
    return FarmChoice(url=job.farm, certificates=job.certificates, bench=job.bench or "", device=job.device)


def _extraction(job: commands.Search[Any], run: OpenedSession) -> Callable[[], Found]:
    return lambda: run.search.extract(
        job.file, job.shapes, job.precision, calibration=job.calibration, like=job.current
    )


def _told(session: TuningSession, outcome: Publication) -> events.Tuned:
    stages = Counter(p.stage for p in session.tasks)
    failures: Counter[str] = Counter()
    for p in session.tasks:
        failures.update(p.failures)
    table = session.table()
    return like(
        events.Tuned,
        outcome,
        trials=session.trials,
        seconds=round(session.seconds, 1),
        tuned=stages[TaskState.TUNED],
        skipped=stages[TaskState.SKIPPED],
        lost=stages[TaskState.LOST],
        failures=dict(failures),
        spent=session.spent.rounded(),
        tasks=table.tasks,
        model=table.model,
        forms=table.forms,
    )
