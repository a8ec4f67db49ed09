"""Rewriting rules of convolutions, with explicit padding, and of Col2Im, a transposed one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import NodeCall, NodeRefused, Value

from .layout import backwards, cut, cut_negative, pad, pad_axis, reshape, transpose, with_axis

MAX_SPATIAL = 3


def window(c: NodeCall, name: str, spatial: int, default: int = 1) -> list[int]:
    """A per-axis attribute such as strides, or its default."""
    found = c.ints(name) or [default] * spatial
    if len(found) != spatial or min(found) < 0 or (name != "output_padding" and min(found) < 1):
        raise NodeRefused(f"its {name} {found} do not fit {spatial} spatial dimensions")
    return found


def explicit_pads(c: NodeCall, spatial: int) -> list[int]:
    """The `pads` attribute, zeros where there is none or `auto_pad` is VALID."""
    given = None if c.text("auto_pad", "NOTSET") == "VALID" else c.ints("pads")
    return given or [0] * (2 * spatial)


def spatial_pads(
    c: NodeCall,
    extents: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial axis, `auto_pad` resolved as ONNX says."""
    spatial = len(extents)
    mode = c.text("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        axes = zip(extents, kernel, strides, dilations, strict=True)
        return _halve([max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n) for n, k, s, d in axes], mode)
    given = explicit_pads(c, spatial)
    if mode not in ("NOTSET", "VALID") or len(given) != 2 * spatial:
        raise NodeRefused(f"its auto_pad {mode} or pads {given} do not fit {spatial} spatial dimensions")
    return given[:spatial], given[spatial:]


def _halve(totals: Sequence[int], mode: str) -> tuple[list[int], list[int]]:
    """Return amounts before and after each axis; the odd one is after for SAME_UPPER, else before."""
    before = [total // 2 if mode == "SAME_UPPER" else total - total // 2 for total in totals]
    return before, [total - low for total, low in zip(totals, before, strict=True)]


def taps(
    b: Builder,
    padded: Value,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    outputs: Sequence[int],
) -> Iterator[Value]:
    """Yield, for each place in a window, its input elements: tensors with the extents of the output."""
    for place in itertools.product(*map(range, kernel)):
        tap = padded
        for axis, (k, s, d, n) in enumerate(zip(place, strides, dilations, outputs, strict=True), start=2):
            tap = cut(b, tap, axis, k * d, k * d + (n - 1) * s + 1, s)
        yield tap


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A convolution's window, with padding that is not negative."""

    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]
    group: int

    def apply(self, b: Builder, op: str, x: Value, w: Value) -> Value:
        """The core operator `op` on `x` and the weights `w`."""
        return b(
            op,
            x,
            w,
            kernel_shape=list(w.shape[2:]),
            strides=self.strides,
            dilations=self.dilations,
            pads=[*self.before, *self.after],
            group=self.group,
        )


def _spatial(x: Value, w: Value) -> int:
    """Return the number of convolved dimensions."""
    if not 1 <= x.rank - 2 <= MAX_SPATIAL or w.rank != x.rank:
        raise NodeRefused(
            f"it convolves a tensor of {x.rank} dimensions; 3 to {MAX_SPATIAL + 2} are supported"
        )
    return x.rank - 2


def geometry(b: Builder, c: NodeCall, x: Value, w: Value) -> tuple[Value, Geometry]:
    """The call's attributes resolved; negative padding is cut from `x`, which is returned too."""
    spatial = _spatial(x, w)
    strides, dilations = window(c, "strides", spatial), window(c, "dilations", spatial)
    before, after = spatial_pads(c, x.shape[2:], w.shape[2:], strides, dilations)
    group = c.integer("group", 1)
    if group < 1 or x.shape[1] != w.shape[1] * group or w.shape[0] % group:
        raise NodeRefused(
            f"its {group} groups do not fit {x.shape[1]} input and {w.shape[0]} output channels"
        )
    x, before, after = cut_negative(b, x, [0, 0, *before], [0, 0, *after])
    return x, Geometry(strides=strides, dilations=dilations, before=before[2:], after=after[2:], group=group)


def convolve(b: Builder, x: Value, w: Value, g: Geometry) -> Value:
    """The convolution of `x` with `w`, without bias."""
    if math.prod(w.shape[1:]) == 1:
        return _scale_channels(b, x, w, g)
    return g.apply(b, "Conv", x, w)


def _scale_channels(b: Builder, x: Value, w: Value, g: Geometry) -> Value:
    """A kernel of one element: each output channel is an input channel times a number."""
    y = pad(b, x, [0, 0, *g.before], [0, 0, *g.after], 0)
    for axis, stride in enumerate(g.strides, start=2):
        y = cut(b, y, axis, 0, y.shape[axis], stride)
    n, channels, *space = y.shape
    each = w.shape[0] // channels
    apart = reshape(b, y, [n, channels, 1, *space])
    scaled = b("Mul", apart, reshape(b, w, [channels, each, *[1] * len(space)]))
    return reshape(b, scaled, [n, w.shape[0], *space])


def channel_bias(b: Builder, y: Value, bias: Value | None) -> Value:
    """`y` plus one number for each channel."""
    return y if bias is None else b("Add", y, reshape(b, bias, [1, bias.size] + [1] * (y.rank - 2)))


@rule("Conv")
def conv(b: Builder, c: NodeCall) -> Value:
    """Convolution of one to three spatial dimensions."""
    x, g = geometry(b, c, c.x(0), c.x(1))
    return channel_bias(b, convolve(b, x, c.x(1), g), c.opt(2))


@rule("ConvTranspose")
def conv_transpose(b: Builder, c: NodeCall) -> Value:
    """Transposed convolution of one to three spatial dimensions."""
    x, w = c.x(0), c.x(1)
    spatial = _spatial(x, w)
    strides, dilations = window(c, "strides", spatial), window(c, "dilations", spatial)
    extra = window(c, "output_padding", spatial, 0)
    reach = [(k - 1) * d for k, d in zip(w.shape[2:], dilations, strict=True)]
    before, after = _output_cuts(c, x.shape[2:], reach, strides, extra)
    after = [p - e for p, e in zip(after, extra, strict=True)]
    group = c.integer("group", 1)
    g = Geometry(strides=strides, dilations=dilations, before=before, after=after, group=group)
    return channel_bias(b, convolve_transposed(b, x, w, g), c.opt(2))


def convolve_transposed(b: Builder, x: Value, w: Value, g: Geometry) -> Value:
    """Return a transposed convolution: zeros between input elements, then a convolution by flipped kernels.

    `g.before` and `g.after` are cut off the full output; negative amounts add to it. `w` is laid out [input
    channels, output channels / groups, ...].
    """
    stretched = _stretch(b, x, g.strides)
    reach = [(k - 1) * d for k, d in zip(w.shape[2:], g.dilations, strict=True)]
    low = [r - p for r, p in zip(reach, g.before, strict=True)]
    high = [r - p for r, p in zip(reach, g.after, strict=True)]
    stretched, low, high = cut_negative(b, stretched, [0, 0, *low], [0, 0, *high])
    kernel = reshape(b, w, [g.group, w.shape[0] // g.group, *w.shape[1:]])
    kernel = transpose(b, kernel, [0, 2, 1, *range(3, kernel.rank)])
    kernel = reshape(b, kernel, [w.shape[1] * g.group, w.shape[0] // g.group, *w.shape[2:]])
    for axis in range(2, kernel.rank):
        if kernel.shape[axis] > 1:
            kernel = backwards(b, kernel, axis)
    ones = [1] * len(g.strides)
    whole = Geometry(strides=ones, dilations=g.dilations, before=low[2:], after=high[2:], group=g.group)
    return convolve(b, stretched, kernel, whole)


def _output_cuts(
    c: NodeCall, extents: Sequence[int], reach: list[int], strides: list[int], extra: list[int]
) -> tuple[list[int], list[int]]:
    """Return the amounts cut off the full output.

    From `output_shape` or `auto_pad` where the node has them.
    """
    spatial, mode = len(extents), c.text("auto_pad", "NOTSET")
    full = [s * (n - 1) + r + 1 + e for s, n, r, e in zip(strides, extents, reach, extra, strict=True)]
    wanted = c.ints("output_shape")
    if wanted is not None:
        wanted = wanted[-spatial:]
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(extents, strides, strict=True)]
    if wanted is None:
        given = explicit_pads(c, spatial)
        return given[:spatial], given[spatial:]
    for index, (size, goal) in enumerate(zip(full, wanted, strict=True)):
        extra[index] += max(0, goal - size)  # A larger output than the kernel reaches has zeros after it
    return _halve([max(0, size - goal) for size, goal in zip(full, wanted, strict=True)], mode)


def _stretch(b: Builder, x: Value, strides: Sequence[int]) -> Value:
    """`x` with stride - 1 zeros between neighbours along each spatial axis."""
    for axis, stride in enumerate(strides, start=2):
        extent = x.shape[axis]
        if stride == 1 or extent == 1:
            continue
        padded = pad_axis(b, with_axis(b, x, axis + 1), axis + 1, 0, stride - 1)
        merged = reshape(b, padded, [*x.shape[:axis], extent * stride, *x.shape[axis + 1 :]])
        x = cut(b, merged, axis, 0, (extent - 1) * stride + 1)
    return x


@rule("Col2Im")
def col2im(b: Builder, c: NodeCall) -> Value:
    """A transposed convolution whose kernels each have a single 1."""
    x = c.x()
    image, block = c.numbers(1, "shape"), c.numbers(2, "shape")
    spatial, size = len(image), math.prod(block)
    strides, dilations = c.ints("strides") or [1] * spatial, c.ints("dilations") or [1] * spatial
    pads = explicit_pads(c, spatial)
    reach = [(k - 1) * d for k, d in zip(block, dilations, strict=True)]
    counts = [(n + pads[i] + pads[i + spatial] - reach[i] - 1) // strides[i] + 1 for i, n in enumerate(image)]
    if spatial > MAX_SPATIAL or x.shape[1] % size or math.prod(counts) != x.shape[2]:
        raise NodeRefused(f"its blocks {block} do not fit an image of {image} and columns of {list(x.shape)}")
    channels = x.shape[1] // size
    columns = reshape(b, x, [x.shape[0], x.shape[1], *counts])
    kernels = np.tile(np.eye(size, dtype=x.dtype), (channels, 1)).reshape(channels * size, 1, *block)
    before = pads[:spatial]
    full = [(n - 1) * s + r + 1 for n, s, r in zip(counts, strides, reach, strict=True)]
    after = [f - p - n for f, p, n in zip(full, before, image, strict=True)]
    g = Geometry(strides=strides, dilations=dilations, before=before, after=after, group=channels)
    return convolve_transposed(b, columns, b.constant(kernels), g)
