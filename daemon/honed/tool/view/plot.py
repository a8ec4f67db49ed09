"""Draws a curve over whole numbers in a terminal, or as a PNG or SVG file.

The curve keeps each value until the next. Files are drawn by matplotlib (3.6 or later), which need not be
installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from honed.protocol.errors import NotFound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox


_BRAILLE = 0x2800
# Bits of a braille cell by row, left and right dot (Unicode, "Braille Patterns").
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_TICK_STEPS = (1, 2, 2.5, 5, 10)
_UNITS = ((1.0, "us"), (1e3, "ms"), (1e6, "s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A labelled point beside the curve."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve to draw. `points` are (x, y) by rising x, at least one; no y is negative."""

    title: str
    x_name: str
    y_name: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[Mark] = ()

    @property
    def right(self) -> float:
        """The largest x of points and marks, at least 1."""
        return max(1.0, *(x for x, _ in self.points), *(mark.x for mark in self.marks))

    @property
    def top(self) -> float:
        """The largest y of points and marks, above 0."""
        return max(*(y for _, y in self.points), *(mark.y for mark in self.marks), 1e-9)

    def at(self, x: float) -> float | None:
        """Return the curve's value at `x`; None to the left of the curve."""
        value = None
        for begins, y in self.points:
            if begins > x:
                break
            value = y
        return value


def microseconds(largest: float) -> tuple[float, str]:
    """Return the unit in which times up to `largest` us read best: its microseconds and its name."""
    return next((size, unit) for size, unit in reversed(_UNITS) if largest >= size or size == 1.0)


def ticks(largest: float, count: int, *, whole: bool = False) -> list[float]:
    """Return round values from 0 to the first that is not below `largest`, about `count` of them."""
    if not (largest > 0 and math.isfinite(largest)):
        return [0.0, 1.0]
    magnitude = 10.0 ** math.floor(math.log10(largest / count))
    step = next((s * magnitude for s in _TICK_STEPS if largest / (s * magnitude) <= count), 10.0 * magnitude)
    if whole:
        step = max(1.0, math.ceil(step))
    return [i * step for i in range(max(1, math.ceil(largest / step - 1e-9)) + 1)]


def number(value: float) -> str:
    """Return a tick's label."""
    return f"{value:,.10g}"


def text(curve: Curve, width: int, height: int, *, braille: bool = True) -> list[str]:
    """Return the curve as lines of at most `width` characters; it is drawn in a field of `height` lines.

    With `braille` False it is drawn in ASCII, for terminals that show no more.
    """
    y_ticks = ticks(curve.top, max(2, height // 4))
    labels = {height - 1 - round(t / y_ticks[-1] * (height - 1)): number(t) for t in y_ticks}
    margin = max(map(len, labels.values())) + 1
    columns = max(width - margin - 2, 10)
    across, down = (2, 4) if braille else (1, 1)
    field = _field(curve, columns * across, height * down, y_ticks[-1])
    bar, tick, corner, dash, foot = "│┤└─┬" if braille else "|+`-+"
    lines = [curve.title, f"{curve.y_name}"]
    for row in range(height):
        label = labels.get(row, "")
        cells = "".join(_cell(field, row, column, braille=braille) for column in range(columns))
        lines.append(f"{label:>{margin}} {tick if row in labels else bar}{cells}".rstrip())
    x_ticks = [t for t in ticks(curve.right, max(2, columns // 16), whole=True) if t <= curve.right]
    places = {round(t / curve.right * (columns - 1)): number(t) for t in x_ticks}
    axis = "".join(foot if column in places else dash for column in range(columns))
    lines.append(f"{'':>{margin}} {corner}{axis}")
    lines.append(_below(places, columns, margin + 2, curve.x_name))
    return lines


def _field(curve: Curve, columns: int, rows: int, top: float) -> set[tuple[int, int]]:
    """Return the dots that are set, as (row, column)."""
    found: set[tuple[int, int]] = set()
    before: int | None = None
    for column in range(columns):
        value = curve.at(column / max(columns - 1, 1) * curve.right)
        if value is None:
            continue
        row = rows - 1 - round(value / top * (rows - 1))
        begin = row if before is None else before
        found.update((each, column) for each in range(min(row, begin), max(row, begin) + 1))
        before = row
    return found


def _cell(field: set[tuple[int, int]], row: int, column: int, *, braille: bool) -> str:
    if not braille:
        return "*" if (row, column) in field else " "
    bits = sum(_BITS[y][x] for y in range(4) for x in range(2) if (4 * row + y, 2 * column + x) in field)
    return chr(_BRAILLE + bits) if bits else " "


def _below(places: dict[int, str], columns: int, margin: int, name: str) -> str:
    """Return labels under their ticks, without those that would overlap, and the axis's name."""
    line = ""
    room = columns + margin - len(name) - 1
    for column, label in sorted(places.items()):
        start = margin + column - len(label) // 2
        if start > len(line) and start + len(label) <= room:
            line = line.ljust(start) + label
    return line.ljust(room + 1) + name


_INCHES, _DOTS = (9.6, 5.4), 100  # 960 by 540 pixels
_BLUE, _RED, _PALE = "#1c62c4", "#c43428", "#dee2e8"
# Offsets of a label from its mark, in points; the first free place is used.
_PLACES = ((4, 8), (4, -16), *((4, 8 + 14 * n) for n in range(1, 6)), (4, -30))


def draw_picture(file: BinaryIO, kind: Literal["png", "svg"], curve: Curve) -> None:
    """Draw a curve with axes, labels and marks; raise NotFound without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError as error:
        raise NotFound(
            "pictures are drawn by matplotlib, which is not installed; install it "
            "(apt install python3-matplotlib)"
        ) from error
    figure = Figure(_INCHES, _DOTS, layout="constrained")
    axes = figure.subplots()
    plain: dict[str, Any] = {"loc": "left", "parse_math": False}  # A dollar sign is shown as it is
    axes.set_title(curve.title, **plain)
    axes.set_xlabel(curve.x_name)
    axes.set_ylabel(curve.y_name)
    axes.set_xlim(0, curve.right)
    axes.set_ylim(0, 1.05 * curve.top)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.grid(axis="y", color=_PALE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    xs, ys = zip(*curve.points, strict=True)
    axes.step([*xs, curve.right], [*ys, ys[-1]], where="post", color=_BLUE, linewidth=2)
    for mark in curve.marks:
        axes.plot(mark.x, mark.y, "o", color=_RED, clip_on=False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    write_labels(axes, curve.marks)
    figure.savefig(file, format=kind)


def write_labels(axes: Axes, marks: Sequence[Mark]) -> list[Bbox]:
    """Label marks without overlaps; leave out those without room.

    Returns the boxes of the labels written, in pixels.
    """
    taken: list[Bbox] = []
    for mark in marks:
        right = mark.x > sum(axes.get_xlim()) / 2
        for across, up in _PLACES:
            label = axes.annotate(
                mark.label,
                (mark.x, mark.y),
                (-across if right else across, up),
                textcoords="offset points",
                horizontalalignment="right" if right else "left",
                color=_RED,
                parse_math=False,
            )
            box = label.get_window_extent()
            free = not any(box.overlaps(other) for other in taken)
            if free and axes.bbox.y0 < box.y0 and box.y1 < axes.figure.bbox.y1 and box.x0 >= 0:
                taken.append(box)
                break
            label.remove()
    return taken
