"""`python -m honed.tuner tune | tasks`: a tuning run as JSON lines."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from honed.runtime.errors import DeviceError, HonedError, ModelRefused
from honed.runtime.kernellog import Reader, open_reader
from honed.tuner.records import Records
from honed.tuner.setup import setup_for
from honed.tuner.shapes import parse_shapes

from .compare import Comparison, compare
from .profiling import measured_profile
from .search_child import SearchChild
from .session import Budget, Model, Session
from .task import Stage

Emit = Callable[[dict[str, Any]], None]
_COMPILE_SECONDS = 900.0
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
        run.session.run(Budget(trials=0))
    emit({"event": "done"})


def tune_model(arguments: argparse.Namespace, emit: Emit) -> None:
    """Tune within the budget, compile with the best schedules, compare, and tell."""
    with _opened(arguments, emit) as run:
        session = run.session
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: session.stop())
        session.run(Budget(trials=arguments.trials, seconds=arguments.seconds))
        spec = run.spec
    emit(_published(arguments, emit, session, spec))


class _opened:  # noqa: N801 - reads as a function
    """Everything a session needs, closed afterwards."""

    def __init__(self, arguments: argparse.Namespace, emit: Emit) -> None:
        emit({"event": "stage", "stage": "extract", "fraction": 0.0, "text": "look at the device"})
        self.spec, profile = measured_profile(arguments.device, arguments.cache_dir)
        setup = setup_for(profile.identity)
        model = Model(
            path=arguments.file,
            name=arguments.name or arguments.file.stem,
            shapes=parse_shapes(arguments.shape),
            precision=arguments.precision,
        )
        arguments.records.parent.mkdir(parents=True, exist_ok=True)
        self.records = Records.open(arguments.records)
        for note in self.records.notes:
            emit({"event": "note", "text": note})
        cost_model = arguments.cache_dir / "cost-models" / f"{setup.device_key[:16]}.npz"
        self.search = SearchChild(profile, cost_model, getattr(arguments, "seed", 0))
        self.session = Session(
            model, setup, self.spec, profile, self.records, self.search, emit, _kernel_log(emit)
        )

    def __enter__(self) -> _opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.search.close()
        self.records.close()


def _kernel_log(emit: Emit) -> Reader | None:
    try:
        return open_reader()
    except HonedError as error:
        emit({"event": "note", "text": f"candidates are not watched for GPU faults: {error}"})
        return None


def _published(arguments: argparse.Namespace, emit: Emit, session: Session, spec: str) -> dict[str, Any]:
    """Compile the best, compare it with what is served now, and say what came of it."""
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
        **session.table(),
        "before_us": None,
        "after_us": None,
    }
    if arguments.output is None or all(p.best_trace is None for p in session.tasks):
        return event | {"sentence": "no schedule faster than the present ones was found"}
    emit({"event": "stage", "stage": "publish", "fraction": 0.0, "text": "compile with the best schedules"})
    with tempfile.TemporaryDirectory(prefix="honed-publish-") as folder:
        _compile(arguments, arguments.output, spec, records=True)
        current = arguments.current or Path(folder) / "default.honed"
        if arguments.current is None:
            _compile(arguments, current, spec, records=False)
        emit({"event": "stage", "stage": "publish", "fraction": 0.7, "text": "compare side by side"})
        found = compare(current, arguments.output, spec)
    event |= {"before_us": found.old * 1e6, "after_us": found.new * 1e6}
    sentence = _sentence(found)
    if found.wrong or found.new * _GAIN > found.old:
        arguments.output.unlink(missing_ok=True)
        return event | {"sentence": sentence}
    why = f"tuned: {session.trials} trials in {session.seconds:.0f} s"
    session.records = Records.open(arguments.records)
    with session.records as records:
        records.add_version(session.model.name, why, found.new)
    return event | {"output": str(arguments.output), "sentence": sentence}


def _sentence(found: Comparison) -> str:
    times = f"{found.old * 1e3:.3g} ms before, {found.new * 1e3:.3g} ms now, {found.runs} runs each"
    if found.wrong:
        return f"the tuned model is not used: as a whole it answers wrong ({found.wrong})"
    if found.new * _GAIN > found.old:
        return f"the tuned model is not used: side by side it is not faster ({times})"
    return f"{found.old / found.new:.2f} times faster, measured side by side ({times})"


def _compile(arguments: argparse.Namespace, output: Path, spec: str, *, records: bool) -> None:
    """Compile in a child, as untrusted models always are; raises what it reports."""
    command = [sys.executable, "-P", "-m", "honed.tuner", "compile", str(arguments.file)]
    command += ["-o", str(output), "--device", spec, "--precision", arguments.precision]
    command += [part for shape in arguments.shape for part in ("--shape", shape)]
    if records:
        command += ["--records", str(arguments.records)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"compiling took more than {_COMPILE_SECONDS:g} s") from error
    lines = done.stdout.splitlines()
    event = json.loads(lines[-1]) if lines else {}
    if event.get("event") == "done":
        return
    if event.get("event") == "refused":
        raise ModelRefused(str(event["message"]), tuple(event["reasons"]))
    last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    raise DeviceError(event.get("message") or f"compiling with the best schedules failed: {last}")
