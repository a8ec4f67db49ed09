"""Rewriting rules of resizing: along each axis an output element is a weighted sum of a few input elements.

Positions and weights are computed while compiling, from ONNX's definition of Resize, so that every coordinate
transformation, interpolation, antialiasing and cropping compiles to a few gathers and products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import Array, NodeCall, NodeRefused, Value, normal_axis

from .layout import along, expand, reshape, with_axis

MAX_TAPS = 64  # Input elements one output element may take along an axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The resizing of an axis."""

    extent: int
    output: int
    scale: float
    crop: tuple[float, float]  # Start and end of the region of interest, as shares of the axis


@rule("Resize", "Upsample")
def resize(b: Builder, c: NodeCall) -> Value:
    """Axis by axis: gathers for nearest, weighted gathers for linear and cubic."""
    x = c.x()
    axes = [normal_axis(a, x.rank) for a in (c.ints("axes") or range(x.rank))]
    old = c.op == "Upsample" or c.opset < 11
    transform = "asymmetric" if old else c.text("coordinate_transformation_mode", "half_pixel")
    outside, result = c.number("extrapolation_value", 0.0), x
    beyond: list[tuple[int, Array]] = []
    for axis, how in _plan(c, x, axes).items():
        positions = coordinates(how, transform)
        if np.array_equal(positions, np.arange(how.extent)) and how.output == how.extent:
            continue
        if transform == "tf_crop_and_resize":
            away = (positions < 0) | (positions > how.extent - 1)
            if away.any():
                beyond.append((axis, away))
        result = _along(b, c, result, axis, how, positions)
    for axis, away in beyond:
        result = b("Where", b.constant(along(away, axis, x.rank)), outside, result)
    return result


def _plan(c: NodeCall, x: Value, axes: Sequence[int]) -> dict[int, Axis]:
    """Return the resizing of each axis, from scales or sizes.

    Lengths are as in ONNX Runtime: products in float32, in which 2.35 times 20 is 47, of the whole axis even
    where a region of interest is less.
    """
    sizes: list[int] | None = None
    if c.op == "Upsample" and c.opset < 9:
        scales = c.attrs.get("scales")
    elif c.op == "Upsample" or c.opset < 11:
        scales = c.const(1, "scales").tolist()
    else:
        given, sizes = c.opt_const(2, "scales"), c.opt_numbers(3, "sizes") or None
        scales = None if given is None or given.size == 0 else given.tolist()
    extents = [x.shape[a] for a in axes]
    if sizes is not None:
        scales, sizes = _from_sizes(c.text("keep_aspect_ratio_policy", "stretch"), extents, sizes)
    if scales is None or len(scales) != len(axes) or min(scales, default=1) <= 0:
        raise NodeRefused(f"its scales or sizes do not fit {len(axes)} axes")
    roi = c.opt_const(1, "roi") if c.op == "Resize" and c.opset >= 11 else None
    crop = c.text("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    plan: dict[int, Axis] = {}
    for i, axis in enumerate(axes):
        start, end = (float(roi[i]), float(roi[i + len(axes)])) if crop and roi is not None else (0.0, 1.0)
        length = int(np.float32(scales[i]) * np.float32(extents[i])) if sizes is None else sizes[i]
        if length < 1:
            raise NodeRefused(f"it shrinks axis {axis} to nothing")
        plan[axis] = Axis(extent=extents[i], output=length, scale=float(scales[i]), crop=(start, end))
    return plan


def _from_sizes(policy: str, extents: list[int], sizes: list[int]) -> tuple[list[float], list[int]]:
    ratios = [s / n for s, n in zip(sizes, extents, strict=True)]
    if policy == "stretch":
        return ratios, sizes
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [scale] * len(sizes), [int(np.floor(scale * n + 0.5)) for n in extents]


def coordinates(how: Axis, mode: str) -> Array:
    """Return, for each output position, the position in the input it samples.

    Computed in float32: nearest neighbours at ties follow single precision, as in ONNX Runtime.
    """
    out, half = np.arange(how.output, dtype=np.float32), np.float32(0.5)
    scale, last = np.float32(how.scale), how.extent - 1
    exact = scale * np.float32(how.extent)  # Output length before rounding
    start, end = how.crop
    match mode:
        case "asymmetric":
            return out / scale
        case "tf_half_pixel_for_nn":
            return (out + half) / scale
        case "half_pixel_symmetric":
            middle = np.float32(how.extent) / 2 * (1 - np.float32(how.output) / exact)
            return middle + (out + half) / scale - half
        case "align_corners":
            # ONNX's evaluator divides by the length before rounding; ONNX Runtime and PyTorch do not.
            return out * last / (how.output - 1) if how.output > 1 else np.zeros(how.output)
        case "tf_crop_and_resize":
            if how.output == 1:
                return np.full(1, 0.5 * (start + end) * last)
            return start * last + out * (end - start) * last / (how.output - 1)
        case "pytorch_half_pixel" if how.output == 1:
            return np.zeros(1)
        case "half_pixel" | "pytorch_half_pixel":
            return (out + half) / scale - half
    raise NodeRefused(f"its coordinate transformation {mode!r} does not exist")


def _along(b: Builder, c: NodeCall, x: Value, axis: int, how: Axis, positions: Array) -> Value:
    if c.text("mode", "nearest") == "nearest":
        old = c.op == "Upsample" or c.opset < 11
        mode = "floor" if old else c.text("nearest_mode", "round_prefer_floor")
        return _nearest(b, x, axis, _round(positions, mode, how))
    places, weights = taps(c, how, positions)
    if not places:
        raise NodeRefused("its interpolation weights are all zero")

    def parts() -> Iterator[Value]:
        for place, weight in zip(places, weights, strict=True):
            part = b("Gather", x, b.constant(place), axis=axis)
            whole = np.all(weight == 1)
            yield part if whole else b("Mul", part, b.constant(along(weight, axis, x.rank).astype(x.dtype)))

    return b.chain("Add", parts())


def _round(positions: Array, mode: str, how: Axis) -> Array:
    table: dict[str, Callable[[Array], Array]] = {
        "round_prefer_floor": lambda p: np.ceil(p - 0.5),
        "round_prefer_ceil": lambda p: np.floor(p + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    if mode not in table:
        raise NodeRefused(f"its nearest mode {mode!r} does not exist")
    return np.clip(table[mode](positions), 0, how.extent - 1).astype(np.int64)


def _nearest(b: Builder, x: Value, axis: int, places: Array) -> Value:
    """A gather; whole factors become a broadcast, which needs no indices."""
    extent = x.shape[axis]
    times = len(places) // extent
    if times > 1 and np.array_equal(places, np.repeat(np.arange(extent), times)):
        wide = expand(b, with_axis(b, x, axis + 1), [*x.shape[: axis + 1], times, *x.shape[axis + 1 :]])
        return reshape(b, wide, [*x.shape[:axis], extent * times, *x.shape[axis + 1 :]])
    return b("Gather", x, b.constant(places), axis=axis)


def taps(c: NodeCall, how: Axis, positions: Array) -> tuple[list[Array], list[Array]]:
    """Input positions and their weights, one array over the output for each tap that is not always 0."""
    kernel, support = _kernel(c.text("mode", "nearest"), c.number("cubic_coeff_a", -0.75))
    antialias, exclude = bool(c.integer("antialias")), bool(c.integer("exclude_outside"))
    stretch = max(1.0, 1.0 / how.scale) if antialias else 1.0
    reach = int(np.ceil(support * stretch))
    if 2 * reach > MAX_TAPS:
        raise NodeRefused(f"it shrinks by so much that {2 * reach} elements make one; use pooling before it")
    base = np.floor(positions).astype(np.int64)
    offsets = np.arange(-reach + 1, reach + 1)
    places = base[None, :] + offsets[:, None]
    weights = kernel((positions[None, :] - places) / stretch)
    outside = (places < 0) | (places >= how.extent)
    if exclude or antialias:
        weights = np.where(outside & exclude, 0.0, weights)
        weights = weights / weights.sum(axis=0, keepdims=True)
    kept = [i for i in range(len(offsets)) if np.any(weights[i] != 0)]
    bounded = np.clip(places, 0, how.extent - 1)
    return [bounded[i] for i in kept], [weights[i] for i in kept]


def _kernel(mode: str, a: float) -> tuple[Callable[[Array], Array], float]:
    """Return the interpolation kernel and half its width (Keys 1981 for cubic, with his coefficient `a`)."""
    if mode in ("linear", "bilinear"):
        return lambda d: np.maximum(0.0, 1.0 - np.abs(d)), 1.0
    if mode != "cubic":
        raise NodeRefused(f"its mode {mode!r} does not exist")

    def cubic(d: Array) -> Array:
        d = np.abs(d)
        near = (a + 2) * d**3 - (a + 3) * d**2 + 1
        far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0.0))

    return cubic, 2.0
