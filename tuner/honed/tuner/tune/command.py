"""The jobs that tune a model and publish it, and that list its tasks."""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from honed.jobs import commands, events
from honed.jobs.commands import Compile, Tune
from honed.jobs.events import Stage
from honed.protocol.errors import NotFound
from honed.protocol.strict import copy_fields

from .children import Extract, compile_apart
from .compare import Compared, compare
from .session import Emit, OpenInstrument, SearchBudget, SessionResources, TuningSession, on_device
from .task import CUT, ModelTasks, TaskState

_PREDICTED = "predicted for {device}: {gained}; times are bounds, and no answer was checked on the device"
_BY_OTHERS = (
    "measured on {device} by the farm, kernel by kernel: {gained}; the whole model is "
    "compared where it is added"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The outcome of publishing a session; fields as in `honed.jobs.events.Tuned`."""

    sentence: str
    output: str | None = None
    before_us: float | None = None
    after_us: float | None = None


def publish(job: Tune, emit: Emit, run: SessionResources) -> Publication:
    """Compile with the best schedules; compare whole models where the device is on this machine.

    A bench checks no answers, and a farm's model is compared where it is added.
    """
    if job.instrument is None:
        return _compile_and_compare(job, emit, run)
    outcome = Publication(
        sentence=(_BY_OTHERS if run.instrument.answers else _PREDICTED).format(
            device=run.profile.identity.name, gained=_gain_text(run.session)
        )
    )
    if job.output is None or not run.session.tasks:
        return outcome
    emit(Stage(stage="publish", fraction=0.0, text="compile with the best schedules"))
    with tempfile.TemporaryDirectory(prefix="honed-publish-") as folder:
        compile_apart(_compilation(job, job.output, run, folder))
    return replace(outcome, output=str(job.output))


def _compile_and_compare(job: Tune, emit: Emit, run: SessionResources) -> Publication:
    """Compile with the best schedules and compare with the version served now.

    Keep the result only if it is faster.
    """
    session, spec = run.session, run.spec
    if job.output is None or not session.improved:
        return Publication(sentence=_nothing(session))
    assert spec is not None
    emit(Stage(stage="publish", fraction=0.0, text="compile with the best schedules"))
    with tempfile.TemporaryDirectory(prefix="honed-publish-") as folder:
        wanted = replace(_compilation(job, job.output, run, folder), device=spec)
        compile_apart(wanted)
        current = job.current or Path(folder) / "default.honed"
        if job.current is None:
            compile_apart(replace(wanted, output=current, records=None, existing_build=wanted.output))
        emit(Stage(stage="publish", fraction=0.7, text="compare side by side"))
        found = compare(current, job.output, spec)
    outcome = Publication(sentence=_sentence(found), before_us=found.old * 1e6, after_us=found.new * 1e6)
    if found.wrong or not found.faster:
        job.output.unlink(missing_ok=True)
        return outcome
    why = f"tuned: {session.trials} trials in {session.seconds:.0f} s"
    run.records.add_version(session.name, why, found.new)
    return replace(outcome, output=str(job.output))


def _compilation(job: Tune, output: Path, run: SessionResources, folder: str) -> Compile:
    """Return the compilation for the device that was tuned on; write its profile to a file in `folder`."""
    profile = Path(folder) / "profile.toml"
    profile.write_text(run.profile.dumps())
    return job.derive(
        Compile,
        "sizes",
        "keep_slower",
        name=None,
        output=output,
        device=None,
        profile=profile,
        existing_build=job.current,
        memory_mib=0,
    )


def _nothing(session: TuningSession) -> str:
    """Return the reason why nothing faster was found, as text."""
    if session.trials:
        return "no schedule faster than the present ones was found"
    if session.stopped:
        return "it was stopped before a candidate was tried"
    reasons = Counter(p.reason for p in session.tasks if p.reason)
    if CUT in reasons:
        return "the time or trials allowed ended before a candidate was tried; allow more"
    most = f", most often because: {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"nothing could be tried: no task is left to tune{most}"


def _sentence(result: Compared) -> str:
    times = f"{result.old * 1e3:.3g} ms before, {result.new * 1e3:.3g} ms now, {result.runs} runs each"
    if result.wrong:
        return f"the tuned model is not used: as a whole it answers wrong ({result.wrong})"
    if not result.faster:
        return f"the tuned model is not used: side by side it is not faster ({times})"
    return f"{result.old / result.new:.2f} times faster, measured side by side ({times})"


def _gain_text(session: TuningSession) -> str:
    model = session.table().model
    if not session.improved:
        return _nothing(session)
    return f"{model.before_us / 1e3:.3g} ms with default schedules, {model.now_us / 1e3:.3g} ms now"


def list_tasks(job: commands.Tasks, emit: Emit) -> events.Done:
    """Extract the tasks and time their default schedules; search nothing."""
    with _open(job, emit) as run:
        run.session.run(_extraction(job, run), SearchBudget(trials=0))
    return events.Done()


def tune_model(job: commands.Tune, emit: Emit) -> events.Tuned:
    """Tune within the budget, compile with the best schedules, and compare."""
    with _stoppable() as stop, _open(job, emit, job.seed) as run:
        stop.session = run.session
        if stop.asked:
            run.session.stop()
        run.session.run(_extraction(job, run), SearchBudget(trials=job.trials, seconds=job.seconds))
        run.search.close()
        if job.instrument is None:  # Figures are reported only for a device that serves
            emit(events.Totals(tuning=run.records.figures()))
        return _result(run.session, publish(job, emit, run))


@dataclass(slots=True)
class _Stop:
    """A signal handler that notes the request to stop and passes it on to the session."""

    asked: bool = False
    session: TuningSession | None = None

    def __call__(self, _number: int, _frame: object) -> None:
        self.asked = True
        if self.session is not None:
            self.session.stop()


@contextmanager
def _stoppable() -> Iterator[_Stop]:
    """Let SIGINT and SIGTERM end the search but not the run: schedules found until then are used."""
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open(job: commands.Search[Any], emit: Emit, seed: int = 0) -> SessionResources:
    return SessionResources(
        job.name or job.file.stem,
        _instrument(job),
        records=job.records,
        cache_dir=job.cache_dir,
        seed=seed,
        emit=emit,
        hints=job.hints,
    )


def _instrument(job: commands.Search[Any]) -> OpenInstrument:
    """Return the function that opens the device that the job measures on, or an extension's instrument."""
    if job.instrument is None:
        return partial(on_device, job.device, job.cache_dir)
    missing = f"a {job.instrument}"
    try:
        for each in entry_points(group="honed.instruments", name=job.instrument):
            return partial(each.load(), job)
    except ModuleNotFoundError as error:
        missing = str(error.name)
    raise NotFound(
        f"{missing} is not installed; install honed-farm (apt install honed-farm, or pip install "
        "'honed[farm]')"
    )


def _extraction(job: commands.Search[Any], run: SessionResources) -> Callable[[], ModelTasks]:
    call = copy_fields(Extract, job, path=job.file, existing_build=job.current)
    return lambda: run.search.find_tasks(call)


def _result(session: TuningSession, outcome: Publication) -> events.Tuned:
    stages = Counter(p.stage for p in session.tasks)
    failures = sum((p.failures for p in session.tasks), Counter[str]())
    table = session.table()
    return copy_fields(
        events.Tuned,
        outcome,
        trials=session.trials,
        seconds=round(session.seconds, 1),
        tuned=stages[TaskState.TUNED],
        skipped=stages[TaskState.SKIPPED],
        lost=stages[TaskState.FAILED],
        failures=dict(failures),
        spent=session.spent.round_times(),
        tasks=table.tasks,
        model=table.model,
        forms=table.forms,
    )
