"""Shows a tuning run as it goes, live in a terminal, or line by line elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

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
from honed.protocol.strict import to_plain
from honed.tool.output import Console, RenderableType, clean, console, fields, seconds_text

from .tasks import count_text, failures_text, latency_text, milliseconds, progress_table, short

if TYPE_CHECKING:
    from rich.live import Live

_AROUND = 10  # Lines of the live view besides the tasks
_REFRESHES = 2  # Refreshes of the live view per second
NOTHING = Estimate(before_us=0.0, now_us=0.0)  # Estimate until the tasks are reported


@dataclass(slots=True, kw_only=True)
class TuningRun:
    """The state of a tuning run. Times are in seconds of one monotonic clock, which the caller reads."""

    model: str
    trials_wanted: int | None
    begun: float | None = None  # Start of the search
    stage: str = ""
    text: str = ""
    rows: dict[str, TaskRow] = field(default_factory=dict)
    forms: tuple[FusionRow, ...] = ()
    estimate: Estimate = NOTHING
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


def run_document(done: Tuned, run: TuningRun) -> dict[str, Any]:
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


class TuningView:
    """A view of a run on stderr. Use it as a context manager; `show` each event."""

    def __init__(self, run: TuningRun) -> None:
        self._run = run
        self._live: Live | None = None
        self._console: Console | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._start()
        return self

    def show(self, event: News) -> None:
        """Update the run from an event, and print its line if there is no terminal."""
        before, now = self._run.stage, time.monotonic()
        self._run.take(event, now)
        if self._live is None:
            said = _line(self._run, event, now, new_stage=self._run.stage != before)
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

    def _start(self) -> None:
        from rich.live import Live

        self._console = console(sys.stderr, follow=True)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=_REFRESHES,
            transient=True,
            vertical_overflow="crop",
        )
        self._live.start()

    def _render(self) -> RenderableType:
        assert self._console is not None
        size = self._console.size
        return render(self._run, time.monotonic(), size.width, size.height)


def render(run: TuningRun, now: float, width: int, height: int) -> RenderableType:
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
    return Group(*parts, Text(""), fields(_summary(run, now)))


def _summary(run: TuningRun, now: float) -> list[tuple[str, str]]:
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


def _line(run: TuningRun, event: News, now: float, *, new_stage: bool) -> str:
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
