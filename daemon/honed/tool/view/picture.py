"""Curves as a PNG or SVG file, drawn by matplotlib (3.6 or later), which need not be installed."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from honed.protocol.errors import NotFound

from .plot import Curve, Mark, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

_INCHES, _DOTS = (9.6, 5.4), 100  # 960 by 540 pixels
_BLUE, _GREEN, _OCHRE, _RED, _PALE = "#1c62c4", "#188448", "#b07010", "#c43428", "#dee2e8"
# Where a label may stand beside its mark, in points from there: the first that is free.
_PLACES = ((4, 8), (4, -16), *((4, 8 + 14 * n) for n in range(1, 6)), (4, -30))


def draw(file: BinaryIO, kind: Literal["png", "svg"], curve: Curve, *others: Curve) -> None:
    """Curves with axes, labels and marks. Title and names are those of the first.

    Raises NotFound without matplotlib.
    """
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
    plain: dict[str, Any] = {"loc": "left", "parse_math": False}  # a dollar sign is one
    axes.set_title(curve.title, **plain)
    axes.set_xlabel(curve.x_name)
    axes.set_ylabel(curve.y_name)
    axes.set_xlim(0, max(one.right for one in (curve, *others)))
    axes.set_ylim(0, 1.05 * max(one.top for one in (curve, *others)))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.grid(axis="y", color=_PALE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    marks: list[tuple[Mark, str]] = []
    for one, colour in zip((curve, *others), cycle((_BLUE, _GREEN, _OCHRE))):
        xs, ys = zip(*one.points, strict=True)
        axes.step([*xs, one.right], [*ys, ys[-1]], where="post", color=colour, linewidth=2)
        marks += [(mark, colour if others else _RED) for mark in one.marks]
    for mark, colour in marks:
        axes.plot(mark.x, mark.y, "o", color=colour, clip_on=False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    write_labels(axes, marks)
    figure.savefig(file, format=kind)


def write_labels(axes: Axes, marks: list[tuple[Mark, str]]) -> list[Bbox]:
    """Label marks in their colours, no label over another; one that finds no room is left out.

    The places of those written, in pixels.
    """
    taken: list[Bbox] = []
    for mark, colour in marks:
        right = mark.x > sum(axes.get_xlim()) / 2
        for across, up in _PLACES:
            label = axes.annotate(
                mark.label,
                (mark.x, mark.y),
                (-across if right else across, up),
                textcoords="offset points",
                horizontalalignment="right" if right else "left",
                color=colour,
                parse_math=False,
            )
            box = label.get_window_extent()
            free = not any(box.overlaps(other) for other in taken)
            if free and axes.bbox.y0 < box.y0 and box.y1 < axes.figure.bbox.y1 and box.x0 >= 0:
                taken.append(box)
                break
            label.remove()
    return taken
