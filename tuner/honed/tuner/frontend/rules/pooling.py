"""Rewriting rules of pooling over windows."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import Array, NodeCall, NodeRefused, Value

from .convolution import MAX_SPATIAL, explicit_pads, spatial_pads, taps, window
from .indexing import scatter_elements
from .layout import along, cut, pad, reshape, strides_of
from .reduction import reduce

MAX_TAPS = 256  # Window positions an unrolled pooling may have


@dataclass(frozen=True, slots=True)
class Window:
    """A pooling window over each spatial axis, with the padding that makes every output whole."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]
    beyond: list[int]  # Additional amounts in `after`, beyond the padding that the model requests
    outputs: list[int]


def _window(c: NodeCall, x: Value) -> Window:
    spatial = x.rank - 2
    if not 1 <= spatial <= MAX_SPATIAL:
        raise NodeRefused(f"it pools a tensor of {x.rank} dimensions; 3 to {MAX_SPATIAL + 2} are supported")
    kernel, strides = window(c, "kernel_shape", spatial), window(c, "strides", spatial)
    dilations = window(c, "dilations", spatial)
    before, after = spatial_pads(c, x.shape[2:], kernel, strides, dilations)
    if min([*before, *after]) < 0:
        raise NodeRefused("its padding is negative")
    outputs, beyond = [], [0] * spatial
    for i, extent in enumerate(x.shape[2:]):
        reach = (kernel[i] - 1) * dilations[i] + 1
        room = extent + before[i] + after[i] - reach
        count = (-(-room // strides[i]) if c.integer("ceil_mode") else room // strides[i]) + 1
        # A window that would start in the padding after the input is left out (ONNX since 1.16).
        if c.integer("ceil_mode") and (count - 1) * strides[i] >= extent + before[i]:
            count -= 1
        if count < 1:
            raise NodeRefused(f"its window of {reach} is larger than the padded input of {room + reach}")
        needed = (count - 1) * strides[i] + reach - extent - before[i]
        beyond[i] = max(0, needed - after[i])
        after[i] = max(after[i], needed) if needed > 0 else after[i]
        outputs.append(count)
    return Window(kernel, strides, dilations, before, after, beyond, outputs)


def _pool(b: Builder, op: str, x: Value, w: Window, **attrs: int) -> Value:
    """The core operator `op` over the windows of `x`."""
    pads = [*w.before, *w.after]
    y = b(op, x, **attrs, kernel_shape=w.kernel, strides=w.strides, dilations=w.dilations, pads=pads)
    for axis, count in enumerate(w.outputs, start=2):
        y = cut(b, y, axis, 0, count)
    return y


@rule("MaxPool")
def max_pool(b: Builder, c: NodeCall) -> list[Value]:
    """MaxPool with explicit padding; unrolled for indices or integers."""
    x = c.x()
    w = _window(c, x)
    plain = x.dtype.kind == "f" and not c.wants(1)
    small = all(
        p < (k - 1) * d + 1 for p, k, d in zip(w.before + w.after, w.kernel * 2, w.dilations * 2, strict=True)
    )
    # Windows of one element reduce nothing: strided slices suffice
    if plain and small and math.prod(w.kernel) > 1:
        return [_pool(b, "MaxPool", x, w)]
    lowest = -np.inf if x.is_float else np.iinfo(x.dtype).min
    best, *others = _taps(b, x, w, lowest)
    if not c.wants(1):
        return [b.chain("Max", [best, *others])]
    places = [b.constant(p) for p in _places(x, w, column_major=bool(c.integer("storage_order")))]
    place = places[0]
    for tap, candidate in zip(others, places[1:], strict=True):
        better = b("Less", best, tap)
        best, place = b("Where", better, tap, best), b("Where", better, candidate, place)
    base = np.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1], *[1] * (x.rank - 2))
    return [best, b("Add", place, b.constant(base * math.prod(x.shape[2:])))]


def _taps(b: Builder, x: Value, w: Window, fill: float) -> list[Value]:
    if math.prod(w.kernel) > MAX_TAPS:
        raise NodeRefused(f"its window of {math.prod(w.kernel)} elements is too large to be unrolled")
    padded = pad(b, x, [0, 0, *w.before], [0, 0, *w.after], fill)
    return list(taps(b, padded, w.kernel, w.strides, w.dilations, w.outputs))


def _places(x: Value, w: Window, *, column_major: bool) -> list[Array]:
    """Return, for each place in the window, the flat position of its elements in the channel's plane."""
    extents = x.shape[2:]
    weights = strides_of(extents[::-1])[::-1] if column_major else strides_of(extents)
    found: list[Array] = []
    for place in itertools.product(*(range(k) for k in w.kernel)):
        total = np.zeros([1, 1, *w.outputs], np.int64)
        for i, (k, weight) in enumerate(zip(place, weights, strict=True)):
            places = np.arange(w.outputs[i]) * w.strides[i] + k * w.dilations[i] - w.before[i]
            total = total + along(np.clip(places, 0, extents[i] - 1), i, len(extents)) * weight
        found.append(total)
    return found


@rule("AveragePool")
def average_pool(b: Builder, c: NodeCall) -> Value:
    """AveragePool, corrected by the number of elements in each window."""
    return average_windows(b, c, c.x(), counted=bool(c.integer("count_include_pad")) and c.opset >= 7)


def average_windows(b: Builder, c: NodeCall, x: Value, *, counted: bool) -> Value:
    """Return averages over the call's windows of `x`; with `counted` the divisor includes the padding."""
    w = _window(c, x)
    total = _average(b, x, w)
    numbers = _counts(x, w, padding=counted)
    whole = math.prod(w.kernel)
    if np.all(numbers == whole):
        return total
    return b("Mul", total, b.constant((whole / numbers).astype(x.dtype)))


def _average(b: Builder, x: Value, w: Window) -> Value:
    """Return sums over each window, with padding as 0, over the window's size."""
    if math.prod(w.kernel) == 1:
        return _taps(b, x, w, 0)[0]
    return _pool(b, "AveragePool", x, w, count_include_pad=1)


def _counts(x: Value, w: Window, *, padding: bool) -> Array:
    """Return the number of elements (or elements and requested padding) in each window: [1, 1, *outputs]."""
    numbers = np.ones([1, 1, *[1] * len(w.outputs)])
    for i, extent in enumerate(x.shape[2:]):
        starts = np.arange(w.outputs[i])[:, None] * w.strides[i] - w.before[i]
        positions = starts + np.arange(w.kernel[i])[None, :] * w.dilations[i]
        low = -w.before[i] if padding else 0
        high = extent + w.after[i] - w.beyond[i] if padding else extent
        count = ((positions >= low) & (positions < high)).sum(axis=1)
        numbers = numbers * along(np.maximum(count, 1), i, len(w.outputs))
    return numbers


@rule("LpPool")
def lp_pool(b: Builder, c: NodeCall) -> Value:
    """The p-norm of each window: powers, a sum and a root."""
    x, order = c.x(), c.integer("p", 2)
    w = _window(c, x)
    powers = b("Abs", x) if order == 1 else b("Mul", x, x) if order == 2 else b("Pow", b("Abs", x), order)
    mean = _average(b, powers, w)
    total = b("Mul", mean, math.prod(w.kernel))
    return total if order == 1 else b("Sqrt", total) if order == 2 else b("Pow", total, 1 / order)


@rule("GlobalAveragePool", "GlobalMaxPool")
def global_pool(b: Builder, c: NodeCall) -> Value:
    """A reduction over the spatial axes."""
    op = "ReduceMean" if c.op == "GlobalAveragePool" else "ReduceMax"
    return reduce(b, op, c.x(), list(range(2, c.x().rank)))


@rule("GlobalLpPool")
def global_lp_pool(b: Builder, c: NodeCall) -> Value:
    """The p-norm over the spatial axes."""
    x, order = c.x(), c.integer("p", 2)
    total = reduce(b, "ReduceSum", b("Pow", b("Abs", x), order), list(range(2, x.rank)))
    return b("Pow", total, 1 / order)


@rule("MaxUnpool")
def max_unpool(b: Builder, c: NodeCall) -> Value:
    """Elements written back where a MaxPool found them, zeros elsewhere."""
    x, places = c.x(0), c.x(1)
    spatial = x.rank - 2
    kernel, strides = window(c, "kernel_shape", spatial), window(c, "strides", spatial)
    pads = explicit_pads(c, spatial)
    least = [
        (n - 1) * s - pads[i] - pads[i + spatial] + k
        for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    ]
    shape = c.opt_numbers(2, "output_shape") or [*x.shape[:2], *least]
    b.rely(places, 0, math.prod(x.shape[:2]) * math.prod(least) - 1, "places of its output")
    # The places count in the smallest tensor; a larger requested one has zeros on its far sides.
    zeros = b.constant(np.zeros(math.prod(x.shape[:2]) * math.prod(least), x.dtype))
    flat = scatter_elements(b, zeros, reshape(b, places, [x.size]), reshape(b, x, [x.size]), 0, "none")
    missing = [wanted - have for wanted, have in zip(shape[2:], least, strict=True)]
    if min(missing) < 0:
        raise NodeRefused(f"its output shape {shape} is smaller than the {least} it needs")
    return pad(b, reshape(b, flat, [*x.shape[:2], *least]), [0] * x.rank, [0, 0, *missing], 0)
