"""Implements `hone tune`: searches faster schedules for a model, and serves the resulting version.

The search is shown as it goes: live in a terminal, or line by line elsewhere.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from honed.daemon.settings.places import places, records_in
from honed.daemon.settings.schema import Limits
from honed.jobs.commands import Tune
from honed.jobs.events import (
    Estimate,
    FusionRow,
    News,
    Note,
    Ranking,
    Round,
    Stage,
    TaskRow,
    TasksFound,
    TaskTable,
    Trial,
    Tuned,
)
from honed.protocol.errors import ModelRefused
from honed.protocol.methods import MODEL_PUBLISH, MODEL_SHOW, SERVER_STATUS
from honed.protocol.params import ModelParams
from honed.protocol.results import ModelPlacement, ModelPublished
from honed.protocol.strict import to_plain
from honed.runtime.calling.files import ExportedFiles
from honed.runtime.client import Client
from honed.tool.compiler import CompilerDied, RunningJob, running_in_service, running_job
from honed.tool.output import (
    Console,
    Output,
    RenderableType,
    capital,
    clean,
    console,
    fields,
    line,
    seconds_text,
)
from honed.tool.parser import Parser, UsageError, add_compile_options, count, define, minutes, unique

from .tasks import (
    count_text,
    failures_text,
    latency_text,
    milliseconds,
    print_forms,
    print_reasons,
    progress_table,
    short,
    time_shares_text,
)

if TYPE_CHECKING:
    from rich.live import Live

Searched = tuple[Tuned, ModelPublished | None]  # The child's result, and the service's answer
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
BENCHES = ("mali-g610",)  # The compiler's own list
_RECORDS = "predicted.sqlite"  # Records of predictions, apart from measured ones
_CERTIFICATES = "farm"  # The folder of TLS certificates, beside honed.toml
_FARM_RECORDS = Path("farm", "records.sqlite")  # `hone records export --state-dir` finds them
_AROUND = 10  # Lines of the live view besides the tasks
_REFRESHES = 2  # Refreshes of the live view per second
_NOTHING = Estimate(before_us=0.0, now_us=0.0)  # Estimate until the tasks are reported


def define_tune(tune: Parser) -> None:
    """Define the arguments of `hone tune`."""
    define(
        tune,
        _tune,
        details=(
            "Searches schedules for the model's kernels, measures them on the service's device, and serves "
            "the best that it has verified. It stops when what is left is not worth it, or when the trials "
            "or minutes allowed are used up. Ctrl-C stops it and uses what was found until then; a second "
            "Ctrl-C aborts. What was measured is kept: another run goes on from there. "
            "With --bench no device and no service is used: kernels for a device that is not here are judged "
            "by their machine code. Such times are bounds, and no answer is checked. With --farm the "
            "machines of a farm measure, each on its own device, while this one searches and compiles."
        ),
        examples="""\
            hone tune lightglue
            hone tune lightglue --minutes 20
            hone tune yolox --trials 500 --json
            hone tune lightglue.onnx --bench mali-g610 -o lightglue.honed
            hone tune lightglue.onnx --farm tls://pc:8786 -o lightglue.honed""",
    )
    tune.add_argument(
        "model",
        metavar="M",
        help="name of the model; with --bench an ONNX file, with --farm either",
    )
    tune.add_argument("--trials", metavar="N", type=count, help="candidates to measure at most")
    tune.add_argument("--minutes", metavar="T", type=minutes, help="minutes to search at most")
    _add_elsewhere_options(tune)


def _tune(arguments: argparse.Namespace, output: Output) -> None:
    _check_elsewhere(arguments)
    if _is_elsewhere(arguments):
        _elsewhere(arguments, output)
        return
    model = arguments.model
    run = _TuningRun(model=model, trials_wanted=arguments.trials)
    with Client(arguments.socket) as client:
        state_dir = client.ask(SERVER_STATUS).places.state_dir
        tune = _in_service if arguments.farm is None else _by_farm
        done, answer = tune(client, arguments, run)
        shown = client.ask(MODEL_SHOW, ModelParams(name=model))
    published = answer is not None and answer.published
    if answer is not None:
        done = replace(done, sentence=answer.sentence)
        if published:
            done = replace(done, before_us=answer.old_us, after_us=answer.new_us)
    records = records_in(Path(state_dir)) if arguments.farm is None else _records(arguments)
    document = {
        **_run_document(done, run),
        "model": model,
        "published": published,
        "sha256": shown.sha256,
        "records": str(records),
    }

    def show(console: Console) -> None:
        _print_table(console, done, run, records)
        line(console, result_text(model, done, answer, shown.placement))

    output.emit(document, show)


def _elsewhere(arguments: argparse.Namespace, output: Output) -> None:
    run = _TuningRun(model=Path(arguments.model).name, trials_wanted=arguments.trials)
    with running_job(_file_job(arguments), Limits()) as child:
        done = _search(child, run)
    records = _records(arguments)
    document = {
        "model": run.model,
        "predicted": arguments.bench is not None,
        "farm": arguments.farm,
        "output": done.output,
        **_run_document(done, run),
        "records": str(records),
    }

    def show(console: Console) -> None:
        _print_table(console, done, run, records)
        line(console, f"{capital(done.sentence)}.")
        if done.output:
            line(console, f"{done.output} is written; its answers are checked where it is added.")

    output.emit(document, show)


def _in_service(client: Client, arguments: argparse.Namespace, run: _TuningRun) -> Searched:
    """Have the service tune the model, and serve the result if it is right and faster."""
    seconds = _seconds(arguments)
    with running_in_service(
        client.socket, Tune, model=arguments.model, trials=arguments.trials, seconds=seconds
    ) as child:
        return _search(child, run), child.answered.published


def _by_farm(client: Client, arguments: argparse.Namespace, run: _TuningRun) -> Searched:
    """Tune a model of the service with a farm, and publish the result.

    The service serves it if it is right and faster here, too. Raises ModelRefused for a model without source.
    """
    name = arguments.model
    with client.export(name) as given, TemporaryDirectory(prefix="honed-farm-") as folder:
        if not given.sources:
            raise ModelRefused(f"{name} was added compiled, so there is no source to tune; add it as ONNX")
        with running_job(_farm_job(arguments, given, Path(folder)), Limits()) as child:
            done = _search(child, run)
        if done.output is None:
            return done, None
        why = f"hone tune --farm: {done.trials} trials in {done.seconds:.0f} s"
        answer = client.publish(name, done.output, expected=given.sha256, why=why)
        return done, MODEL_PUBLISH.result_of(answer)


def _search(child: RunningJob[Tuned], run: _TuningRun) -> Tuned:
    """Show the run until it ends, and return the child's result."""
    with _TuningView(run) as view, stopping(child, view.stop):
        try:
            done = child.result(view.show)
        except CompilerDied:
            if run.stopping:  # The user stopped it before it was ready to be
                raise KeyboardInterrupt from None
            raise
        run.take(done, time.monotonic())
        return done


@contextmanager
def stopping(child: RunningJob[Any], stop: Callable[[], None]) -> Iterator[None]:
    """Interrupt the job at the first signal, so that it uses what it has, and call `stop`.

    The second signal raises KeyboardInterrupt.
    """
    asked = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        child.interrupt()
        stop()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True, kw_only=True)
class _TuningRun:
    """The state of a tuning run. Times are in seconds of one monotonic clock, which the caller reads."""

    model: str
    trials_wanted: int | None
    begun: float | None = None  # Start of the search
    stage: str = ""
    text: str = ""
    rows: dict[str, TaskRow] = field(default_factory=dict)
    forms: tuple[FusionRow, ...] = ()
    estimate: Estimate = _NOTHING
    ranking: Ranking | None = None  # Ranking of the latest batch that has one
    trials: int = 0
    seconds_left: float | None = None
    estimated_at: float = 0.0  # Time at which `seconds_left` was estimated
    stopping: bool = False
    notes: list[str] = field(default_factory=list)

    def take(self, event: News | Tuned, now: float) -> None:
        """Update the state from an event of the child, or from its result."""
        match event:
            case Stage():
                self.stage, self.text = event.stage, event.text
            case Note():
                self.notes.append(event.text)
            case Trial():
                self._trial(event)
            case TaskTable():
                self.rows = {row.task: row for row in event.tasks}
                self.estimate = event.model
                self.forms = event.forms
        if isinstance(event, TasksFound):
            self.begun, self.stage, self.text = now, "search", ""
        elif isinstance(event, Round):
            self.trials = event.trials
            self.ranking = event.ranking or self.ranking
            self.seconds_left, self.estimated_at = event.seconds_left, now

    def _trial(self, event: Trial) -> None:
        self.trials += 1
        row = self.rows.get(event.task)
        if row is None:
            return
        best, before = event.best_us, row.best_us
        more: dict[str, Any] = {"trials": row.trials + 1}
        if event.outcome != "right":
            more["failures"] = dict(Counter(row.failures) + Counter([event.outcome]))
        if best:
            more["best_us"], more["gflops"] = best, row.flops / best / 1e3
            more["roofline_share"] = row.roofline_us / best
            won = row.weight * ((before or best) - best)
            self.estimate = replace(self.estimate, now_us=self.estimate.now_us - won)
        self.rows[event.task] = replace(row, **more)

    @property
    def failures(self) -> Mapping[str, int]:
        """Numbers of failures of all tasks, by reason."""
        whole: Counter[str] = Counter()
        for row in self.rows.values():
            whole.update(row.failures)
        return whole

    def rate(self, now: float) -> float | None:
        """Return the trials a second since the search began; None before the first."""
        if self.begun is None or not self.trials or now <= self.begun:
            return None
        return self.trials / (now - self.begun)

    def remaining_seconds(self, now: float) -> float | None:
        """Return the seconds until the time or the trials are used up; None if unlimited or unknown."""
        if self.seconds_left is not None:
            return max(0.0, self.seconds_left - (now - self.estimated_at))
        rate = self.rate(now)
        if self.trials_wanted is None or not rate:
            return None
        return max(0.0, (self.trials_wanted - self.trials) / rate)

    @property
    def ranking_text(self) -> str:
        """A sentence on how well the cost model ranked the latest batch."""
        if self.ranking is None:
            return "not measured yet"
        correlation = self.ranking.correlation
        known = math.isfinite(correlation)
        return (
            f"rank correlation {f'{correlation:.2f}' if known else 'unknown'} in the latest batch of "
            f"{self.ranking.batch}, whose fastest it ranked {self.ranking.best_rank}."
        )


def _run_document(done: Tuned, run: _TuningRun) -> dict[str, Any]:
    """Return the part of a run's --json output that does not depend on where the run was done."""
    plain = to_plain(done)
    for name in ("output", "model"):
        del plain[name]
    return {
        **plain,
        "stopped": run.stopping,
        "estimate": to_plain(run.estimate),
        "ranking": to_plain(run.ranking),
        "notes": run.notes,
        "tasks": [to_plain(row) for row in run.rows.values()],
    }


class _TuningView:
    """A view of a run on stderr. Use it as a context manager; `show` each event."""

    def __init__(self, run: _TuningRun) -> None:
        self._run = run
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.live import Live

            shown = console(sys.stderr, follow=True)
            self._live = Live(
                get_renderable=lambda: _live_view(self._run, time.monotonic(), *shown.size),
                console=shown,
                refresh_per_second=_REFRESHES,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def show(self, event: News) -> None:
        """Update the run from an event, and print its line if there is no terminal."""
        before, now = self._run.stage, time.monotonic()
        self._run.take(event, now)
        if self._live is None:
            said = _event_text(self._run, event, now, new_stage=self._run.stage != before)
            if said:
                print(f"tune {self._run.model}: {clean(said)}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Record that the user asked to stop; signal handlers may call it."""
        self._run.stopping = True
        if self._live is None:
            said = f"tune {self._run.model}: stopping after this candidate; Ctrl-C again to abort\n"
            os.write(2, said.encode())

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _live_view(run: _TuningRun, now: float, width: int, height: int) -> RenderableType:
    """Return the live view, for a terminal of this size."""
    from rich.console import Group
    from rich.text import Text

    head = Text(short(f"tune {run.model}: {run.text or run.stage or 'start'}", width), style="bold")
    if not run.rows:
        return head
    rows = list(run.rows.values())
    ranked = [row for row in rows if row.state != "skipped"] + [r for r in rows if r.state == "skipped"]
    shown = ranked[: max(1, height - _AROUND)]
    parts: list[RenderableType] = [head, progress_table(shown, width)]
    if len(shown) < len(ranked):
        parts.append(Text(f"and {count_text(ranked[len(shown) :])}"))
    return Group(*parts, Text(""), fields(_live_summary(run, now)))


def _live_summary(run: _TuningRun, now: float) -> list[tuple[str, str]]:
    rate, left = run.rate(now), run.remaining_seconds(now)
    spent = seconds_text(now - run.begun) if run.begun is not None else "0 s"
    made = f"{run.trials} in {spent}" + (f", {rate:.2f} a second" if rate else "")
    pairs = [
        ("latency", latency_text(run.estimate)),
        ("trials", made),
        ("failed", failures_text(run.failures) or "none"),
        ("cost model", run.ranking_text),
    ]
    if run.stopping:
        pairs.append(("time left", "stopping after this candidate; Ctrl-C again to abort"))
    else:
        pairs.append(("time left", seconds_text(left) if left is not None else "until no more is worth it"))
    return pairs


def _event_text(run: _TuningRun, event: News, now: float, *, new_stage: bool) -> str:
    """Return the line printed for an event without a terminal; "" for none."""
    match event:
        case Stage() if new_stage:
            return run.text or run.stage
        case Note():
            return f"note: {event.text}"
        case TasksFound():
            return f"{count_text(run.rows.values())}; {latency_text(run.estimate)}"
        case Round():
            row = run.rows.get(event.task)
            best = f", {short(row.name, 40)} {row.best_us:,.1f} us" if row and row.best_us else ""
            rate, left = run.rate(now), run.remaining_seconds(now)
            speed = f" ({rate:.2f} a second)" if rate else ""
            end = f", {seconds_text(left)} left" if left is not None else ""
            latency = milliseconds(run.estimate.now_us)
            return f"{run.trials} trials{speed}, estimated {latency}{best}{end}"
        case _:
            return ""


def _print_table(console: Console, done: Tuned, run: _TuningRun, records: Path) -> None:
    rows = list(run.rows.values())
    console.print(progress_table(rows, console.width))
    console.print()
    print_reasons(console, rows)
    print_forms(console, run.forms)
    rate = f", {done.trials / done.seconds:.2f} a second" if done.seconds else ""
    pairs = [
        ("tasks", f"{done.tuned} tuned, {done.skipped} skipped, {done.lost} lost"),
        ("trials", f"{done.trials} in {seconds_text(done.seconds)}{rate}"),
        ("spent", time_shares_text(done.spent)),
        ("failed", failures_text(done.failures) or "none"),
        ("cost model", run.ranking_text),
        ("records", str(records)),
        *(("note", note) for note in run.notes),
    ]
    console.print(fields(pairs))
    console.print()


def result_text(model: str, done: Tuned, answer: ModelPublished | None, placement: ModelPlacement) -> str:
    """Return the result of tuning in a sentence; `answer` is the service's, None if nothing was published."""
    if answer is None:
        return f"{model} is served as before: {done.sentence}."
    before, after = answer.old_us, answer.new_us
    if not answer.published or not before or not after:
        return f"{model}: {answer.sentence}."
    by_cpu = placement.engine == "cpu"
    return (
        f"{model} is {'tuned' if by_cpu else 'served tuned'}: {milliseconds(before)} an inference before, "
        f"{milliseconds(after)} now, {before / after:.2f} times as fast, measured side by side."
    ) + (f" The CPU engine goes on serving it: {placement.why}." if by_cpu else "")


# `hone tune FILE --bench DEVICE` and `--farm URL` tune a file without this machine's device.


def _add_elsewhere_options(tune: argparse.ArgumentParser) -> None:
    group = tune.add_argument_group("options of tuning a file for a device that is not here")
    group.add_argument(
        "--bench",
        metavar="DEVICE",
        choices=BENCHES,
        help=f"predict times for this device from machine code ({', '.join(BENCHES)}); M is an ONNX file",
    )
    add_bench_root(group)
    group.add_argument(
        "--farm",
        metavar="URL",
        help="have the machines of this farm measure, or with --bench predict; M may be an ONNX file",
    )
    add_certificates(group)
    group.add_argument(
        "--device", metavar="NAME", help="part of the device's name, where a farm has boards of several"
    )
    group.add_argument("-o", "--output", metavar="OUT", type=Path, help="the .honed file to write")
    add_compile_options(group)


def add_bench_root(parser: argparse._ActionsContainer) -> None:
    """Add --bench-root, the folder of the offline compiler."""
    parser.add_argument(
        "--bench-root",
        metavar="DIR",
        type=Path,
        help="where benchmarks/valhall/build has made the offline compiler",
    )


def add_certificates(parser: argparse._ActionsContainer) -> None:
    """Add --certificates, the folder of the farm's TLS certificates."""
    parser.add_argument(
        "--certificates",
        metavar="DIR",
        type=Path,
        help="folder with ca.pem, cert.pem and key.pem for TLS (default: farm beside honed.toml)",
    )


def certificates(arguments: argparse.Namespace) -> Path:
    """Return the folder of the farm's TLS certificates."""
    given: Path | None = arguments.certificates
    return given or places(os.environ, os.geteuid()).config.parent / _CERTIFICATES


def _check_elsewhere(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options of bench or farm without these, and for these without a file."""
    given = {
        "--bench-root": arguments.bench_root is not None,
        "--certificates": arguments.certificates is not None,
        "--device": arguments.device is not None,
        "--output": arguments.output is not None,
        "--shape": bool(arguments.shape),
        "--precision": arguments.precision != "auto",
        "--calibration": arguments.calibration is not None,
    }
    if not _is_elsewhere(arguments):
        of_farm = () if arguments.farm is None else ("--certificates", "--device")
        for name, is_given in given.items():
            if is_given and name not in of_farm:
                raise UsageError(f"{name} goes with a file and --bench or --farm; see 'hone tune --help'")
        return
    if not Path(arguments.model).is_file():
        option = "--bench" if arguments.farm is None else "--farm"
        raise UsageError(f"{option} takes an ONNX file, and there is no file {arguments.model}")
    if arguments.farm is None:
        for name in ("--certificates", "--device"):
            if given[name]:
                raise UsageError(f"{name} goes with --farm; see 'hone tune --help'")


def _is_elsewhere(arguments: argparse.Namespace) -> bool:
    """Return whether a file is tuned without the service, on a bench or with a farm."""
    path = Path(arguments.model)
    is_file = path.suffix == ".onnx" or path.is_file()
    return arguments.bench is not None or (arguments.farm is not None and is_file)


def _farm_job(arguments: argparse.Namespace, export: ExportedFiles, folder: Path) -> Tune:
    """Return the job that tunes a model of the service with a farm; its files are written to `folder`."""
    return replace(
        _job(arguments, export.save_sources(folder / "source")),
        name=arguments.model,
        shapes=export.shapes,
        precision=export.precision,
        current=export.save_compiled(folder / "given.honed"),
        output=folder / "tuned.honed",
    )


def _file_job(arguments: argparse.Namespace) -> Tune:
    return replace(
        _job(arguments, Path(arguments.model)),
        shapes=unique("--shape", arguments.shape),
        precision=arguments.precision,
        calibration=arguments.calibration,
        output=arguments.output,
    )


def _job(arguments: argparse.Namespace, file: Path) -> Tune:
    """Return the job's common part: what measures and for how long, and the records."""
    bench = arguments.bench
    if arguments.farm is not None:
        instrument = "farm"
        settings = {"url": arguments.farm, "certificates": certificates(arguments), "bench": bench}
    else:
        instrument, settings = "bench", {"device": bench, "root": arguments.bench_root}
    return Tune(
        file=file,
        # A bench's predictions are kept apart from the history of a served model.
        name=None if bench is None else f"{file.stem} ({bench}, predicted)",
        instrument=instrument,
        settings={name: str(value) for name, value in settings.items() if value is not None},
        device=arguments.device,
        records=_records(arguments),
        cache_dir=places(os.environ, os.geteuid()).cache_dir,
        trials=arguments.trials,
        seconds=_seconds(arguments),
    )


def _seconds(arguments: argparse.Namespace) -> float | None:
    """Return the time limit in seconds, None without one."""
    return None if arguments.minutes is None else float(arguments.minutes * 60)


def _records(arguments: argparse.Namespace) -> Path:
    """Return the file for the records of a bench or a farm."""
    name = _FARM_RECORDS if arguments.bench is None else _RECORDS
    return places(os.environ, os.geteuid()).state_dir / name
