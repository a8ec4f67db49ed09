"""Curves as a PNG file, drawn with NumPy and packed with zlib (PNG specification, third edition)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import cycle, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from . import lettering
from .plot import Curve, number, ticks

WIDTH, HEIGHT = 960, 540  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 32, 72, 72  # margins, pixels
_INK, _PALE, _RED = (32, 36, 44), (222, 226, 232), (196, 52, 40)
_LINES = ((28, 98, 196), (24, 132, 72), (176, 112, 16))  # of the curves, in turn
_TEXT, _TITLE = 1.7, 2.3  # pixels per unit of lettering
_LINE = 18  # pixels from one line of labels to the next
Colour = tuple[int, int, int]


def png(curve: Curve, *others: Curve) -> bytes:
    """Curves with axes, labels and marks; a file's content. Title and names are those of the first."""
    curves, sheet = (curve, *others), _Sheet()
    right = max(one.right for one in curves)
    y_ticks = ticks(max(one.top for one in curves), 6)
    x_ticks = [t for t in ticks(right, 8, whole=True) if t <= right]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (WIDTH - _LEFT - _RIGHT) * x / right
        up = (HEIGHT - _TOP - _BOTTOM) * y / y_ticks[-1]
        return _LEFT + across, HEIGHT - _BOTTOM - up

    for tick in y_ticks:
        _, y = place(0, tick)
        sheet.line([(_LEFT, y), (WIDTH - _RIGHT, y)], 1.0, _PALE if tick else _INK)
        sheet.write(number(tick), _LEFT - 10, y - 3 * _TEXT, _TEXT, align=1.0)
    for tick in x_ticks:
        x, y = place(tick, 0)
        sheet.line([(x, y), (x, y + 6)], 1.0, _INK)
        sheet.write(number(tick), x, y + 14, _TEXT, align=0.5)
    fits = (WIDTH - _LEFT - _RIGHT) / max(lettering.width(curve.title), 1.0)
    sheet.write(curve.title, _LEFT, 18, min(_TITLE, fits))
    sheet.write(curve.y_name, _LEFT, 46, _TEXT)
    sheet.write(curve.x_name, WIDTH - _RIGHT, HEIGHT - 24, _TEXT, align=1.0)
    colours = list(islice(cycle(_LINES), len(curves)))
    for one, colour in zip(curves, colours, strict=True):
        sheet.line([place(x, y) for x, y in _steps(one)], 2.5, colour)
    marks = [
        (mark, colour if others else _RED)
        for one, colour in zip(curves, colours, strict=True)
        for mark in one.marks
    ]
    dots = [place(mark.x, mark.y) for mark, _ in marks]
    labels = label_places(dots, [_TEXT * lettering.width(mark.label) for mark, _ in marks])
    for (mark, colour), (x, y), found in zip(marks, dots, labels, strict=True):
        sheet.line([(x, y), (x, y)], 9.0, colour)
        if found is not None:
            sheet.write(mark.label, *found, _TEXT, colour=colour)
    return _packed(sheet.pixels)


def label_places(
    dots: Sequence[tuple[float, float]], widths: Sequence[float]
) -> list[tuple[float, float] | None]:
    """Where the label of each dot begins, in pixels: over no other; None where there is no room."""
    places: list[tuple[float, float] | None] = []
    for (x, y), width in zip(dots, widths, strict=True):
        left = min(x, WIDTH - _RIGHT - width)
        taken = [(*p, w) for p, w in zip(places, widths, strict=False) if p is not None]
        rows = [y + 10, y - 24, *(y - 24 - _LINE * n for n in range(1, 6)), y + 10 + _LINE]
        inside = (top for top in rows if _TOP - _LINE < top < HEIGHT - _BOTTOM - _LINE)
        free = (
            top
            for top in inside
            if all(abs(top - t) >= _LINE or left + width < at or at + w < left for at, t, w in taken)
        )
        top = next(free, None)
        places.append(None if top is None else (left, top))
    return places


def _steps(curve: Curve) -> list[tuple[float, float]]:
    """The corners of the curve, which ends at its largest x."""
    corners = [curve.points[0]]
    for x, y in curve.points[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return [*corners, (curve.right, corners[-1][1])]


class _Sheet:
    """A white sheet to draw smooth lines on."""

    def __init__(self) -> None:
        self._light: NDArray[np.float64] = np.full((HEIGHT, WIDTH, 3), 255.0)

    @property
    def pixels(self) -> NDArray[np.uint8]:
        return np.rint(self._light).astype(np.uint8)

    def line(self, points: Sequence[tuple[float, float]], thickness: float, colour: Colour) -> None:
        """A line through points, with round ends; a single place drawn twice is a dot."""
        for begin, end in pairwise(points):
            self._segment(np.array(begin), np.array(end), thickness / 2, colour)

    def write(
        self,
        text: str,
        x: float,
        y: float,
        scale: float,
        *,
        align: float = 0.0,
        colour: Colour = _INK,
    ) -> None:
        """Text with its top at `y`; `align` 0 begins at `x`, 1 ends there."""
        left = x - align * scale * lettering.width(text)
        for stroke in lettering.strokes(text):
            points = [(left + scale * px, y + scale * py) for px, py in stroke]
            self.line(points, 0.75 * scale, colour)

    def _segment(
        self, begin: NDArray[np.float64], end: NDArray[np.float64], radius: float, colour: Colour
    ) -> None:
        """Colour each pixel by how much of it lies within `radius` of the segment."""
        low = np.floor(np.minimum(begin, end) - radius - 1).astype(int).clip(0)
        high = np.ceil(np.maximum(begin, end) + radius + 2).astype(int)
        window = self._light[low[1] : high[1], low[0] : high[0]]
        rows, columns = np.mgrid[low[1] : low[1] + window.shape[0], low[0] : low[0] + window.shape[1]]
        offsets = np.stack([columns, rows], -1) - begin
        along = end - begin
        length = float(along @ along)
        share = (offsets @ along / length).clip(0, 1) if length else np.zeros(offsets.shape[:2])
        distance = np.linalg.norm(offsets - share[..., None] * along, axis=-1)
        cover = (radius + 0.5 - distance).clip(0, 1)[..., None]
        window += cover * (np.array(colour) - window)


def _packed(pixels: NDArray[np.uint8]) -> bytes:
    """An 8-bit RGB picture: every row unfiltered."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
