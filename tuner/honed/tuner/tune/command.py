"""`python -m honed.tuner tune | tasks`: a tuning run as JSON lines."""

from __future__ import annotations

import argparse
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.tuner.shapes import parse_shapes
from honed.tuner.valhall.benches import BENCHES, marked
from honed.tuner.valhall.compiler import ROOT

from . import publishing
from .instruments import Bench
from .opening import Opened
from .search_child import Found
from .session import Budget, Session
from .task import Stage

Emit = Callable[[dict[str, Any]], None]


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
        parser.add_argument("--calibration", type=Path, help="inputs to measure errors in fp16 on")
        parser.add_argument("--current", type=Path, help="the version served now, which chose the precision")
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--device")
        where.add_argument(
            "--bench", choices=BENCHES, help="judge by machine code for this device, not there"
        )
        parser.add_argument("--bench-root", type=Path, default=ROOT, help="where the bench's compiler is")
        parser.add_argument("--records", type=Path, required=True)
        parser.add_argument("--cache-dir", type=Path, required=True)
        parser.add_argument("--name", help="the model's name in the records")
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
        publish = publishing.predicted if arguments.bench else publishing.measured
        done = _told(run.session) | publish(arguments, emit, run)
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
    name = arguments.name or arguments.file.stem
    return Opened(
        marked(name, arguments.bench) if arguments.bench else name,
        device=arguments.device,
        records=arguments.records,
        cache_dir=arguments.cache_dir,
        seed=getattr(arguments, "seed", 0),
        emit=emit,
        bench=Bench(arguments.bench, arguments.bench_root) if arguments.bench else None,
    )


def _extraction(arguments: argparse.Namespace, run: Opened) -> Callable[[], Found]:
    shapes = parse_shapes(arguments.shape)
    return lambda: run.search.extract(
        arguments.file,
        shapes,
        arguments.precision,
        calibration=arguments.calibration,
        like=arguments.current,
    )


def _told(session: Session) -> dict[str, Any]:
    """The last event of a run, but for what was made of it."""
    stages = Counter(p.stage for p in session.tasks)
    failures: Counter[str] = Counter()
    for p in session.tasks:
        failures.update(p.failures)
    return {
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
