"""Implements `hone tasks`, which lists what can be tuned of a model, and formats tasks for other commands."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from honed.jobs.commands import Tasks
from honed.jobs.events import Done, Estimate, FusionRow, News, Spent, TaskRow, TasksFound
from honed.protocol.methods import MODEL_SHOW
from honed.protocol.params import ModelParams
from honed.protocol.strict import to_plain
from honed.runtime.client import Client
from honed.runtime.compiled.model import ScheduleProvenance, ScheduleSource
from honed.tool.compiler import CompilerDied, RunningJob, running_in_service
from honed.tool.output import Console, Output, Reporter, Table, clean, figure_text, line, table
from honed.tool.parser import Parser, define

_Column = tuple[str, Callable[[TaskRow], str]]  # Heading of a column, and a task's cell
_NAME = 12  # Minimum characters shown of a task's name
_WIDE = 110  # Minimum columns of a terminal that shows everything
_NARROW = 70  # Columns below which only the most important is shown


def define_tasks(tasks: Parser) -> None:
    """Define the arguments of `hone tasks`."""
    define(
        tasks,
        _tasks,
        details=(
            "A task is a kernel's work, with how often one inference runs it. The floor is the least time "
            "that the device's measured peaks allow (Williams' roofline). 'from' says where the schedule "
            "that is served now comes from: 'here' is measured on this machine, with how the search came "
            "to it (moved from a related task, from tables, by evolution or descent, or known from another "
            "driver and measured again); a record was measured on such a device elsewhere; the prior, tables "
            "and rules are taken without a trial. What is not tuned says why. Tasks with 0 runs are "
            "alternatives for the same work, in one kernel or several; the second table compares their times."
        ),
        examples="hone tasks lightglue\nhone tasks lightglue --json",
    )
    tasks.add_argument("model", metavar="M", help="name of the model")


def _tasks(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        shown = client.ask(MODEL_SHOW, ModelParams(name=arguments.model))
        served = {kernel.task: kernel.schedule for kernel in shown.kernels}
        with running_in_service(arguments.socket, Tasks, model=arguments.model) as child:
            found = _find_tasks(child, f"tasks {arguments.model}")
    rows = [{**to_plain(row), "schedule": served.get(row.task)} for row in found.tasks]
    document = {"model": arguments.model, "tasks": rows, "estimate": found.model, "forms": found.forms}
    output.emit(document, lambda console: _print(console, found, served))


def _find_tasks(child: RunningJob[Done], title: str) -> TasksFound:
    """Return the event with the tasks; raise CompilerDied if the child reports none."""
    found: list[TasksFound] = []
    with Reporter(title) as reporter:

        def on_news(event: News) -> None:
            reporter.show(event)
            if isinstance(event, TasksFound):
                found.append(event)

        child.result(on_news)
    if not found:
        raise CompilerDied("the compiler ended without telling the tasks; compare versions")
    return found[-1]


def _print(console: Console, tasks: TasksFound, served: Mapping[str, str]) -> None:
    """Print the tasks; `served` maps each task to its schedule in the version served."""
    columns: list[_Column] = [
        (">runs", lambda row: str(row.weight)),
        (">MFLOP", lambda row: f"{row.flops / 1e6:,.1f}"),
        (">MB", lambda row: f"{row.bytes / 1e6:,.2f}"),
        (">floor us", lambda row: _time(row.roofline_us)),
        (">best us", lambda row: _time(row.best_us)),
        (">of peak", lambda row: _percent(row.roofline_share)),
        ("from", lambda row: origin(served.get(row.task))),
        ("state", state_text),
    ]
    if console.width < _WIDE:
        columns = [column for column in columns if column[0] not in (">MB", ">of peak")]
    console.print(
        _tasks_table(tasks.tasks, columns, _name_room(console.width, 84 if console.width >= _WIDE else 67))
    )
    console.print()
    print_reasons(console, tasks.tasks)
    print_forms(console, tasks.forms)
    line(console, f"{count_text(tasks.tasks)}; {latency_text(tasks.model)}.")


def origin(schedule: str | None) -> str:
    """Return where a schedule comes from, by its name in a compiled file; "-" if the model has none."""
    if schedule is None:
        return "-"
    found = ScheduleProvenance.parse(schedule)
    source = "here" if found.source is ScheduleSource.MEASURED else str(found.source)
    return f"{source}, {found.way}" if found.way else source


def progress_table(rows: Sequence[TaskRow], width: int) -> Table:
    """Return the table of tasks, shown during tuning and afterwards, in `width` columns.

    In fewer columns it shows less.
    """
    wide, narrow = width >= _WIDE, width < _NARROW
    columns: list[_Column] = [
        (">best us", lambda row: _time(row.best_us)),
        (">trials", lambda row: str(row.trials)),
    ]
    if not narrow:
        columns.insert(0, (">runs", lambda row: str(row.weight)))
        columns.insert(2, (">GFLOP/s", lambda row: figure_text(row.gflops, 1) if row.gflops else "-"))
        columns.insert(3, (">of peak", lambda row: _percent(row.roofline_share)))
        columns.append((">failed", lambda row: str(sum(row.failures.values()))))
    if wide:
        columns[-1] = ("failed", lambda row: failures_text(row.failures) or "-")
    columns.append(("state", state_text))
    return _tasks_table(rows, columns, _name_room(width, 95 if wide else 27 if narrow else 63))


def _tasks_table(rows: Iterable[TaskRow], columns: Sequence[_Column], room: int) -> Table:
    """Return a table with a row for each task, its name in `room` characters."""
    return table(
        ("task", *(heading for heading, _ in columns)),
        [(short(row.name, room), *(cell(row) for _, cell in columns)) for row in rows],
    )


def state_text(row: TaskRow) -> str:
    """Return a task's state; "waits" for a task to be tuned that has no trial yet."""
    return "waits" if row.state == "tuning" and not row.trials else str(row.state)


def print_reasons(console: Console, rows: Iterable[TaskRow]) -> None:
    """Print why tasks were not tuned or ended early, tasks with the same reason together."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            # The text after a colon is about one task, and skipped tasks do not need it.
            reason = row.reason.split(":")[0] if row.state == "skipped" else row.reason
            grouped.setdefault((row.state, reason), []).append(row.name)
    for (state, reason), names in grouped.items():
        line(console, f"{state}, {reason}: {', '.join(short(name, 40) for name in names)}")
    if grouped:
        console.print()


def print_forms(console: Console, forms: Iterable[FusionRow]) -> None:
    """Print which tasks can be one kernel or several, and the times of both alternatives."""
    forms = list(forms)
    for form in forms:
        joined, apart = "one kernel", f"{len(form.apart)} kernels"
        taken = joined if form.taken == "joined" else apart
        times = f"{joined} {_time(form.joined_us)} us, {apart} {_time(form.apart_us)} us"
        line(console, f"{taken}: {short(form.name, 40)} ({times})")
    if forms:
        console.print()


def count_text(rows: Iterable[TaskRow]) -> str:
    """Return a sentence such as `14 tasks: 9 tuned, 5 skipped`."""
    states = Counter(state_text(row) for row in rows)
    parts = ", ".join(f"{number} {'waiting' if s == 'waits' else s}" for s, number in states.most_common())
    return f"{states.total()} tasks{f': {parts}' if parts else ''}"


def latency_text(estimate: Estimate) -> str:
    """Return the estimated time of one inference, before tuning and now."""
    before, now = estimate.before_us, estimate.now_us
    if before == now:
        return f"estimated {milliseconds(now)} an inference"
    gain = f", {before / now:.2f} times as fast" if now else ""
    return f"estimated {milliseconds(before)} an inference before, {milliseconds(now)} now{gain}"


def time_shares_text(spent: Spent) -> str:
    """Return the shares of a search's seconds: searching, building, checking, timing."""
    doing = {
        "searching": spent.search,
        "building": spent.build,
        "checking": spent.check,
        "timing": spent.measure,
    }
    whole = sum(doing.values())
    if not whole:
        return "nothing"
    return ", ".join(f"{100 * seconds / whole:.0f} % {text}" for text, seconds in doing.items())


def failures_text(failures: Mapping[str, int]) -> str:
    """Return numbers of failures as `build 3, wrong 1`, the most frequent first."""
    return ", ".join(f"{clean(reason)} {number}" for reason, number in Counter(failures).most_common())


def milliseconds(microseconds: float) -> str:
    """Return a time in ms with four significant digits."""
    return f"{float(f'{microseconds / 1e3:.4g}'):,.10g} ms"


def short(name: str, width: int) -> str:
    """Return `name` in at most `width` characters; the middle of a longer one is left out."""
    name = clean(name)
    if len(name) <= width:
        return name
    kept = max(width - 1, 0)
    return f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}"


def _name_room(width: int, others: int) -> int:
    return max(_NAME, width - others)


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _percent(share: float | None) -> str:
    return f"{share:.0%}" if share else "-"
