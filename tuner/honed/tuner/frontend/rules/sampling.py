"""Sampling images at computed positions.

Positions are bounded before they become indices, so that infinities and NaN cannot lead outside a buffer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from onnx import TensorProto

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import NodeCall, NodeRefused, Value

from .layout import cut, reshape, strides_of, transpose
from .reduction import reduce

CUBIC = -0.75  # Keys' coefficient that ONNX's GridSample uses
_NEAR, _FAR = (CUBIC + 2, -(CUBIC + 3), 0, 1), (CUBIC, -5 * CUBIC, 8 * CUBIC, -4 * CUBIC)
Tap = tuple[Value, Value | None]  # A whole position along one axis as float, and its weight (None: 1)


@rule("GridSample")
def grid_sample(b: Builder, c: NodeCall) -> Value:
    """A weighted sum of a few input elements for each output position."""
    x, grid = c.x(0), c.x(1)
    if x.rank < 3 or grid.shape[-1] != x.rank - 2:
        raise NodeRefused(f"its grid {list(grid.shape)} does not fit its input {list(x.shape)}")
    mode = c.text("mode", "linear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    padding, corners = c.text("padding_mode", "zeros"), bool(c.integer("align_corners"))
    spatial = x.shape[2:]
    n, outputs = x.shape[0], grid.shape[1:-1]
    count = math.prod(outputs)
    axes: list[list[Tap]] = []
    inside: list[list[Value | None]] = []
    for i, extent in enumerate(spatial):
        place = reshape(b, cut(b, grid, grid.rank - 1, len(spatial) - 1 - i, len(spatial) - i), [n, count])
        position = _position(b, place, extent, corners=corners)
        position = b("Round", position) if mode == "nearest" else position
        position = _pad(b, position, extent, padding, corners=corners)
        taps = _taps(b, position, mode)
        bounded = [(_pad(b, p, extent, padding, corners=corners), w) for p, w in taps]
        inside.append([_within(b, p, 0, extent - 1) if padding == "zeros" else None for p, _ in bounded])
        axes.append([(_clamp(b, p, extent), w) for p, w in bounded])
    rows = reshape(b, transpose(b, x, [0, *range(2, x.rank), 1]), [n * math.prod(spatial), x.shape[1]])
    total = _combine_taps(b, rows, axes, inside, spatial)
    moved = transpose(b, total, [0, 2, 1])
    return reshape(b, moved, [n, x.shape[1], *outputs])


def _position(b: Builder, place: Value, extent: int, *, corners: bool) -> Value:
    """Return element positions of places in -1..1, bounded so that index arithmetic stays exact."""
    moved = b("Add", place, 1)
    found = b("Mul", moved, (extent - 1) / 2) if corners else b("Sub", b("Mul", moved, extent / 2), 0.5)
    far = float(1 << 20)
    known = b("Where", b("IsNaN", found), -far, found)  # NaN lies outside
    return b("Min", b("Max", known, -far), far)


def _pad(b: Builder, position: Value, extent: int, padding: str, *, corners: bool) -> Value:
    if padding == "zeros":
        return position
    if padding == "border":
        return _clamp(b, position, extent)
    if padding != "reflection":
        raise NodeRefused(f"its padding mode {padding!r} does not exist")
    low, high = (0.0, extent - 1.0) if corners else (-0.5, extent - 0.5)
    span = high - low
    if span == 0:
        return b("Mul", position, 0)
    # A triangle wave of period 2 * span.
    away = b("Abs", b("Sub", position, low))
    periods = b("Floor", b("Div", away, 2 * span))
    rest = b("Sub", away, b("Mul", periods, 2 * span))
    folded = b("Where", b("Less", span, rest), b("Sub", 2 * span, rest), rest)
    return b("Add", folded, low)


def _clamp(b: Builder, position: Value, extent: int) -> Value:
    return b("Min", b("Max", position, 0), extent - 1)


def _within(b: Builder, position: Value, low: int, high: int) -> Value:
    return b("Not", b("Or", b("Less", position, low), b("Less", high, position)))


def _taps(b: Builder, position: Value, mode: str) -> list[Tap]:
    if mode == "nearest":
        return [(position, None)]
    base = b("Floor", position)
    part, one = b("Sub", position, base), b.like(1, position)
    if mode == "linear":
        return [(base, b("Sub", one, part)), (b("Add", base, one), part)]
    if mode != "cubic":
        raise NodeRefused(f"its mode {mode!r} does not exist")
    taps: list[Tap] = []
    for offset in (-1, 0, 1, 2):
        distance = b("Abs", b("Sub", part, offset))
        weight = _polynomial(b, distance, _NEAR if offset in (0, 1) else _FAR)
        taps.append((b("Add", base, offset), weight))
    return taps


def _polynomial(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    result = b.like(coefficients[0], x)
    for coefficient in coefficients[1:]:
        result = b("Add", b("Mul", result, x), coefficient)
    return result


def _combine_taps(
    b: Builder, rows: Value, axes: list[list[Tap]], inside: list[list[Value | None]], spatial: tuple[int, ...]
) -> Value:
    """Sum over all combinations of taps: [n, positions, channels] from rows [n * elements, channels]."""
    n, count = axes[0][0][0].shape
    start = b.constant((np.arange(n) * math.prod(spatial)).reshape(n, 1).astype(np.int64))
    strides = strides_of(spatial)

    def parts() -> Iterator[Value]:
        for chosen in itertools.product(*(range(len(t)) for t in axes)):
            place, weight, known = start, None, None
            for i, k in enumerate(chosen):
                position, factor = axes[i][k]
                whole = b("Cast", position, to=TensorProto.INT64)
                place = b("Add", place, b("Mul", whole, strides[i]))
                if factor is not None:
                    weight = factor if weight is None else b("Mul", weight, factor)
                mask = inside[i][k]
                if mask is not None:
                    known = mask if known is None else b("And", known, mask)
            part = b("Gather", rows, place, axis=0)
            if known is not None:
                part = b("Where", reshape(b, known, [n, count, 1]), part, 0)
            yield part if weight is None else b("Mul", part, reshape(b, weight, [n, count, 1]))

    return b.chain("Add", parts())


@rule("RoiAlign")
def roi_align(b: Builder, c: NodeCall) -> Value:
    """The average or maximum of bilinear samples on a fixed grid in each bin of each region."""
    x, rois, batches = c.x(0), c.x(1), c.x(2)
    ratio, mode = c.integer("sampling_ratio"), c.text("mode", "avg")
    if ratio < 1:
        raise NodeRefused(
            "its number of samples depends on the regions' size (sampling_ratio 0); give it a number"
        )
    default = "half_pixel" if c.opset >= 16 else "output_half_pixel"
    half = c.text("coordinate_transformation_mode", default) == "half_pixel"
    count, (channels, height, width) = rois.shape[0], x.shape[1:]
    bins = [c.integer("output_height", 1), c.integer("output_width", 1)]
    scaled = b("Mul", rois, c.number("spatial_scale", 1.0))
    if half:
        scaled = b("Sub", scaled, 0.5)
    along: list[list[tuple[Value, Value]]] = []
    valid: list[Value] = []
    for first, extent, parts in ((1, height, bins[0]), (0, width, bins[1])):
        start, end = (cut(b, scaled, 1, i, i + 1) for i in (first, first + 2))
        size = b("Sub", end, start)
        size = size if half else b("Max", size, 1)
        steps = b.constant(((np.arange(parts * ratio) + 0.5) / (parts * ratio)).astype(x.dtype))
        taps, within = _neighbours(b, b("Add", start, b("Mul", size, steps)), extent)
        along.append(taps)
        valid.append(within)
    b.rely(batches, 0, x.shape[0] - 1, "numbers of samples")
    whole = b("Cast", batches, to=TensorProto.INT64)
    bounded = b("Min", b("Max", whole, 0), x.shape[0] - 1)
    start = reshape(b, b("Mul", bounded, height * width), [count, 1, 1])
    rows = reshape(b, transpose(b, x, [0, 2, 3, 1]), [x.shape[0] * height * width, channels])
    samples = _bilinear(b, rows, start, along, valid, width, largest=mode == "max")
    grid = reshape(b, samples, [count, bins[0], ratio, bins[1], ratio, channels])
    pooled = reduce(b, "ReduceMax" if mode == "max" else "ReduceMean", grid, [2, 4], keepdims=False)
    return transpose(b, pooled, [0, 3, 1, 2])


def _neighbours(b: Builder, position: Value, extent: int) -> tuple[list[tuple[Value, Value]], Value]:
    """Both neighbours of positions [regions, bins * ratio] with their weights; which positions are valid."""
    position = b("Min", b("Max", position, -2), extent + 1)
    within = _within(b, position, -1, extent)
    position = _clamp(b, position, extent)
    low = b("Floor", position)
    high = _clamp(b, b("Add", low, 1), extent)
    part = b("Sub", position, low)
    return [(low, b("Sub", 1, part)), (high, part)], within


def _bilinear(
    b: Builder,
    rows: Value,
    start: Value,
    along: list[list[tuple[Value, Value]]],
    valid: list[Value],
    width: int,
    *,
    largest: bool,
) -> Value:
    """Samples [regions, rows, columns, channels]: the four neighbours' weighted sum, or the largest part."""
    count, high, wide = start.shape[0], along[0][0][0].shape[1], along[1][0][0].shape[1]

    def parts() -> Iterator[Value]:
        for (y, wy), (x, wx) in itertools.product(along[0], along[1]):
            row = reshape(b, b("Cast", y, to=TensorProto.INT64), [count, high, 1])
            column = reshape(b, b("Cast", x, to=TensorProto.INT64), [count, 1, wide])
            place = b("Add", b("Add", start, b("Mul", row, width)), column)
            weight = b("Mul", reshape(b, wy, [count, high, 1, 1]), reshape(b, wx, [count, 1, wide, 1]))
            yield b("Mul", b("Gather", rows, place, axis=0), weight)

    total = b.chain("Max" if largest else "Add", parts())
    known = b("And", reshape(b, valid[0], [count, high, 1, 1]), reshape(b, valid[1], [count, 1, wide, 1]))
    return b("Where", known, total, 0)
