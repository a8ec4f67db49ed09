"""Prints results, as one JSON document or as tables and lines for a terminal, and progress.

Names come from model files and other processes, so `clean` escapes all that is not printable.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeAlias

from honed.protocol import strict

if TYPE_CHECKING:
    import rich.console
    import rich.table
    from rich.progress import Progress

    from honed.jobs.events import News

# Strings, because rich is imported only when something is printed with it.
Console: TypeAlias = "rich.console.Console"
RenderableType: TypeAlias = "rich.console.RenderableType"
Table: TypeAlias = "rich.table.Table"
_WIDTH = (200, 24)  # Columns and rows without a terminal: a program that reads columns needs no folding


@dataclass(frozen=True, slots=True)
class Output:
    """The form of a command's result on stdout: JSON, or text for people."""

    json: bool

    def emit(self, document: object, render: Callable[[Console], None]) -> None:
        """Print `document` under --json, else let `render` print it for people."""
        if self.json:
            print_json(document)
        else:
            render(console(sys.stdout))

    def say(self, document: object, text: str) -> None:
        """Print `document` under --json, else `text` as a paragraph for people."""
        self.emit(document, lambda console: line(console, text))


def print_json(document: object) -> None:
    """Print a dataclass, or a map of some, as JSON on stdout.

    NaN and infinity, which JSON lacks, become null.
    """
    json.dump(_finite(strict.to_plain(document)), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def console(stream: TextIO, *, follow: bool = False) -> Console:
    """Return a console on `stream` as wide as the terminal, without markup.

    With `follow`, for output that is shown for long, it also follows changes of the terminal's size.
    """
    from rich.console import Console

    width = None if follow else shutil.get_terminal_size(_WIDTH).columns
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)


_NAME_WIDTH = 32  # Characters of a table's first column that are not folded


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table; columns whose heading starts with ">" are aligned right, long cells folded."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, show_edge=False)
    for heading in columns:
        right = heading.startswith(">")
        made.add_column(
            heading.lstrip(">"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=right,
            header_style="bold",
        )
    for row in rows:
        cells = [clean(cell) for cell in row]
        first = made.columns[0]  # Names are hard to read when folded
        first.min_width = min(_NAME_WIDTH, max(first.min_width or 0, len(cells[0])))
        made.add_row(*map(Text, cells))
    return made


def fields(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values, one pair a line."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(Text(name), Text(clean(value)))
    return made


def line(to: Console, text: str, style: str = "") -> None:
    """Print one paragraph, with unprintable characters as escapes."""
    from rich.text import Text

    to.print(Text(clean(text), style=style))


def clean(text: str) -> str:
    """Return `text` with everything that could steer a terminal, newlines included, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def shape_text(datatype: str, shape: Sequence[int]) -> str:
    """Return a type and a shape as `float32 [1, 3, 224, 224]`."""
    return f"{datatype} [{', '.join(map(str, shape))}]"


def bytes_text(count: float) -> str:
    """Return a number of bytes in the unit that fits it."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def figure_text(value: float, decimals: int = 0) -> str:
    """Return a measured figure with `decimals` decimals, or more if these show less than two digits."""
    return f"{value:.2g}" if abs(value) < 10 ** (1 - decimals) else f"{value:.{decimals}f}"


def seconds_text(seconds: float) -> str:
    """Return a span of time in at most two units, such as "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment_text(seconds: float, precision: str = "seconds") -> str:
    """Return a moment, in seconds since 1970, as local time."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", precision)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Reporter:
    """A reporter of progress on stderr: a bar in a terminal, a line per stage elsewhere.

    Use it as a context manager; call `update` with each piece of news.
    """

    def __init__(self, title: str) -> None:
        self._title = clean(title)
        self._stage = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = _progress_bar()
            self._bar.add_task(self._title, total=1.0, what="")
            self._bar.start()
        return self

    def update(self, stage: str, fraction: float, text: str) -> None:
        """Show that `fraction` of the whole, 0 to 1, is done; `stage` is running, which `text` explains."""
        text = clean(text or stage)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=min(max(fraction, 0.0), 1.0), what=text)
        elif stage != self._stage:
            print(f"{self._title}: {fraction:4.0%} {text}", file=sys.stderr, flush=True)
        self._stage = stage

    def show(self, news: News) -> None:
        """Show a stage or a note of the compiling child; ignore other news."""
        from honed.jobs.events import Note, Stage

        if isinstance(news, Stage):
            self.update(news.stage, news.fraction, news.text)
        elif isinstance(news, Note):
            self.note(news.text)

    def note(self, text: str) -> None:
        """Show a sentence that the user should see."""
        said = f"{self._title}: note: {clean(text)}"
        if self._bar is not None:
            self._bar.console.print(said, soft_wrap=True)
        else:
            print(said, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _progress_bar() -> Progress:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    what = TextColumn("{task.fields[what]}", table_column=Column(ratio=1, no_wrap=True), markup=False)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        what,
        console=console(sys.stderr),
        transient=True,
        expand=True,
    )
