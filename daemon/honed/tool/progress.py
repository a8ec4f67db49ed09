"""How far long work has come, on stderr: a bar in a terminal, a line per stage elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from .output import clean, console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from honed.jobs.events import News


class Reporter:
    """Use as a context manager; call `update` with each piece of news."""

    def __init__(self, title: str) -> None:
        self._title = clean(title)
        self._stage = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._start()
        return self

    def update(self, stage: str, fraction: float, text: str) -> None:
        """`fraction` of the whole is done, 0 to 1; `stage` names the part that runs, `text` explains it."""
        text = clean(text or stage)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=min(max(fraction, 0.0), 1.0), what=text)
        elif stage != self._stage:
            print(f"{self._title}: {fraction:4.0%} {text}", file=sys.stderr, flush=True)
        self._stage = stage

    def show(self, news: News) -> None:
        """Show a stage or a note of the compiling child; other news are left to others."""
        from honed.jobs.events import Note, Stage

        if isinstance(news, Stage):
            self.update(news.stage, news.fraction, news.text)
        elif isinstance(news, Note):
            self.note(news.text)

    def note(self, text: str) -> None:
        """A sentence the user should see."""
        said = f"{self._title}: note: {clean(text)}"
        if self._bar is not None:
            self._bar.console.print(said, soft_wrap=True)
        else:
            print(said, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        what = TextColumn("{task.fields[what]}", table_column=Column(ratio=1, no_wrap=True), markup=False)
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            what,
            console=console(sys.stderr),
            transient=True,
            expand=True,
        )
        self._task = bar.add_task(self._title, total=1.0, what="")
        bar.start()
        self._bar = bar
