"""`python -m honed.tuner tune | tasks`: a tuning run as JSON lines."""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from honed.tuner.shapes import parse_shapes

from .compare import Comparison, compare
from .compiling import Compilation, compile_apart
from .opening import Opened
from .search_child import Found
from .session import Budget, Session
from .task import Stage

Emit = Callable[[dict[str, Any]], None]
# Below this, a difference between two medians is noise.
_GAIN = 1.02


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    """Add `tune` and `tasks` to the parser of the compiling child."""
    tune = commands.add_parser("tune", parents=parents, help="make a model faster on this machine's device")
    tune.set_defaults(run=tune_model)
    tasks = commands.add_parser("tasks", parents=parents, help="the tuning tasks of a model")
    tasks.set_defaults(run=list_tasks)
    for parser in (tune, tasks):
        parser.add_argument("file", type=Path)
        parser.add_argument("--shape", action="append", default=[], metavar="INPUT=1,3,224,224")
        parser.add_argument("--precision", choices=("auto", "fp32", "fp16"), default="auto")
        parser.add_argument("--device")
        parser.add_argument("--records", type=Path, required=True)
        parser.add_argument("--cache-dir", type=Path, required=True)
        parser.add_argument("--name", help="the model's name in the records")
    tune.add_argument("--current", type=Path, help="the version served now, to compare with")
    tune.add_argument("--trials", type=int)
    tune.add_argument("--seconds", type=float)
    tune.add_argument("--seed", type=int, default=0)
    tune.add_argument("-o", "--output", type=Path)


def list_tasks(arguments: argparse.Namespace, emit: Emit) -> None:
    """Extract the tasks and time their default schedules; search nothing."""
    with _opened(arguments, emit) as run:
        run.session.run(_extraction(arguments, run), Budget(trials=0))
    emit({"event": "done"})


def tune_model(arguments: argparse.Namespace, emit: Emit) -> None:
    """Tune within the budget, compile with the best schedules, compare, and tell."""
    with _stoppable() as stop, _opened(arguments, emit) as run:
        stop.session = run.session
        if stop.asked:
            run.session.stop()
        run.session.run(
            _extraction(arguments, run), Budget(trials=arguments.trials, seconds=arguments.seconds)
        )
        run.search.close()
        done = _published(arguments, emit, run)
    emit(done)


@dataclass(slots=True)
class _Stop:
    """Whether a signal asked to stop, and the session to tell."""

    asked: bool = False
    session: Session | None = None

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


def _opened(arguments: argparse.Namespace, emit: Emit) -> Opened:
    return Opened(
        arguments.name or arguments.file.stem,
        device=arguments.device,
        records=arguments.records,
        cache_dir=arguments.cache_dir,
        seed=getattr(arguments, "seed", 0),
        emit=emit,
    )


def _extraction(arguments: argparse.Namespace, run: Opened) -> Callable[[], Found]:
    shapes = parse_shapes(arguments.shape)
    return lambda: run.search.extract(arguments.file, shapes, arguments.precision)


def _published(arguments: argparse.Namespace, emit: Emit, run: Opened) -> dict[str, Any]:
    """Compile the best, compare it with what is served now, and say what came of it."""
    session, spec = run.session, run.spec
    stages = Counter(p.stage for p in session.tasks)
    failures: Counter[str] = Counter()
    for p in session.tasks:
        failures.update(p.failures)
    event: dict[str, Any] = {
        "event": "done",
        "output": None,
        "trials": session.trials,
        "seconds": round(session.seconds, 1),
        "tuned": stages[Stage.TUNED],
        "skipped": stages[Stage.SKIPPED],
        "lost": stages[Stage.LOST],
        "failures": dict(failures),
        "spent": session.spent.plain(),
        **session.table(),
        "before_us": None,
        "after_us": None,
    }
    if arguments.output is None or all(p.best_trace is None for p in session.tasks):
        return event | {"sentence": _nothing(session)}
    emit({"event": "stage", "stage": "publish", "fraction": 0.0, "text": "compile with the best schedules"})
    with tempfile.TemporaryDirectory(prefix="honed-publish-") as folder:
        wanted = Compilation(
            source=arguments.file,
            output=arguments.output,
            device=spec,
            precision=arguments.precision,
            shapes=parse_shapes(arguments.shape),
            records=arguments.records,
        )
        compile_apart(wanted)
        current = arguments.current or Path(folder) / "default.honed"
        if arguments.current is None:
            compile_apart(replace(wanted, output=current, records=None))
        emit({"event": "stage", "stage": "publish", "fraction": 0.7, "text": "compare side by side"})
        found = compare(current, arguments.output, spec)
    event |= {"before_us": found.old * 1e6, "after_us": found.new * 1e6}
    sentence = _sentence(found)
    if found.wrong or found.new * _GAIN > found.old:
        arguments.output.unlink(missing_ok=True)
        return event | {"sentence": sentence}
    why = f"tuned: {session.trials} trials in {session.seconds:.0f} s"
    run.records.add_version(session.name, why, found.new)
    return event | {"output": str(arguments.output), "sentence": sentence}


def _nothing(session: Session) -> str:
    """Why nothing faster is there."""
    if session.trials:
        return "no schedule faster than the present ones was found"
    if session.stopped:
        return "it was stopped before a candidate was tried"
    reasons = Counter(p.reason for p in session.tasks if p.reason)
    most = f", most often because: {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"nothing could be tried: no task is left to tune{most}"


def _sentence(found: Comparison) -> str:
    times = f"{found.old * 1e3:.3g} ms before, {found.new * 1e3:.3g} ms now, {found.runs} runs each"
    if found.wrong:
        return f"the tuned model is not used: as a whole it answers wrong ({found.wrong})"
    if found.new * _GAIN > found.old:
        return f"the tuned model is not used: side by side it is not faster ({times})"
    return f"{found.old / found.new:.2f} times faster, measured side by side ({times})"
