"""Convolutions with explicit padding."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from ..builder import Builder
from ..call import Call, rule
from ..values import Refuse, Value
from .layout import cut, pad, reshape
from .linear import requantise

MAX_SPATIAL = 3


def window(c: Call, name: str, spatial: int, default: int = 1) -> list[int]:
    """A per-axis attribute such as strides, or its default."""
    found = c.ints(name) or [default] * spatial
    if len(found) != spatial or min(found) < 0 or (name != "output_padding" and min(found) < 1):
        raise Refuse(f"its {name} {found} do not fit {spatial} spatial dimensions")
    return found


def spatial_pads(
    c: Call, extents: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial axis, `auto_pad` resolved as ONNX says."""
    spatial = len(extents)
    mode = c.str("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for extent, k, s, d in zip(extents, kernel, strides, dilations, strict=True):
            total = max(0, (-(-extent // s) - 1) * s + (k - 1) * d + 1 - extent)
            small = total // 2
            before.append(small if mode == "SAME_UPPER" else total - small)
            after.append(total - before[-1])
        return before, after
    given = [0] * (2 * spatial) if mode == "VALID" else (c.ints("pads") or [0] * (2 * spatial))
    if mode not in ("NOTSET", "VALID") or len(given) != 2 * spatial:
        raise Refuse(f"its auto_pad {mode} or pads {given} do not fit {spatial} spatial dimensions")
    return given[:spatial], given[spatial:]


def without_negative(b: Builder, x: Value, before: list[int], after: list[int]) -> Value:
    """Negative padding cuts the input; both lists are left with what remains to pad."""
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        if low < 0 or high < 0:
            x = cut(b, x, axis + 2, max(0, -low), x.shape[axis + 2] - max(0, -high))
    before[:], after[:] = [max(0, v) for v in before], [max(0, v) for v in after]
    return x


def convolve(b: Builder, c: Call, x: Value, w: Value) -> Value:
    """The convolution of `x` with `w` under the call's attributes, without bias."""
    spatial = x.rank - 2
    if not 1 <= spatial <= MAX_SPATIAL or w.rank != x.rank:
        raise Refuse(f"it convolves a tensor of {x.rank} dimensions; 3 to {MAX_SPATIAL + 2} are supported")
    kernel = list(w.shape[2:])
    strides, dilations = window(c, "strides", spatial), window(c, "dilations", spatial)
    before, after = spatial_pads(c, x.shape[2:], kernel, strides, dilations)
    x = without_negative(b, x, before, after)
    return b(
        "Conv",
        x,
        w,
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=[*before, *after],
        group=c.int("group", 1),
    )


def channel_bias(b: Builder, y: Value, bias: Value | None) -> Value:
    """`y` plus one number for each channel."""
    return y if bias is None else b("Add", y, reshape(b, bias, [1, bias.size] + [1] * (y.rank - 2)))


@rule("Conv")
def conv(b: Builder, c: Call) -> Value:
    """Convolution of one to three spatial dimensions."""
    return channel_bias(b, convolve(b, c, c.x(0), c.x(1)), c.opt(2))


@rule("ConvTranspose")
def conv_transpose(b: Builder, c: Call) -> Value:
    """Its definition: zeros between the input's elements, then a convolution with the flipped kernel."""
    x, w = c.x(0), c.x(1)
    spatial, group = x.rank - 2, c.int("group", 1)
    if not 1 <= spatial <= MAX_SPATIAL or w.rank != x.rank:
        raise Refuse(f"it convolves a tensor of {x.rank} dimensions; 3 to {MAX_SPATIAL + 2} are supported")
    strides, dilations = window(c, "strides", spatial), window(c, "dilations", spatial)
    extra = window(c, "output_padding", spatial, 0)
    reach = [(k - 1) * d for k, d in zip(w.shape[2:], dilations, strict=True)]
    before, after = _transposed_pads(c, x.shape[2:], reach, strides, extra)
    stretched = _stretch(b, x, strides)
    # What the padding takes away from the output is taken from the kernel's reach around the input.
    low = [r - p for r, p in zip(reach, before, strict=True)]
    high = [r - p + e for r, p, e in zip(reach, after, extra, strict=True)]
    stretched = without_negative(b, stretched, low, high)
    out_channels = w.shape[1] * group
    kernel = reshape(b, w, [group, w.shape[0] // group, *w.shape[1:]])
    kernel = b("Transpose", kernel, perm=[0, 2, 1, *range(3, kernel.rank)])
    kernel = reshape(b, kernel, [out_channels, w.shape[0] // group, *w.shape[2:]])
    for axis in range(2, kernel.rank):
        size = kernel.shape[axis]
        if size > 1:
            kernel = b("Slice", kernel, b.ints(-1), b.ints(-size - 1), b.ints(axis), b.ints(-1))
    y = b(
        "Conv",
        stretched,
        kernel,
        kernel_shape=list(w.shape[2:]),
        strides=[1] * spatial,
        dilations=dilations,
        pads=[*low, *high],
        group=group,
    )
    return channel_bias(b, y, c.opt(2))


def _transposed_pads(
    c: Call, extents: Sequence[int], reach: list[int], strides: list[int], extra: list[int]
) -> tuple[list[int], list[int]]:
    """What is cut off the full output; from `output_shape` or `auto_pad` where they are given."""
    spatial, mode = len(extents), c.str("auto_pad", "NOTSET")
    full = [s * (n - 1) + r + 1 + e for s, n, r, e in zip(strides, extents, reach, extra, strict=True)]
    wanted = c.ints("output_shape")
    if wanted is not None:
        wanted = wanted[-spatial:]
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(extents, strides, strict=True)]
    if wanted is None:
        given = [0] * (2 * spatial) if mode == "VALID" else (c.ints("pads") or [0] * (2 * spatial))
        return given[:spatial], given[spatial:]
    before, after = [], []
    for index, (size, goal) in enumerate(zip(full, wanted, strict=True)):
        total = size - goal
        if total < 0:  # a larger output than the kernel reaches: the rest is zeros after it
            extra[index] -= total
            total = 0
        half = total // 2
        before.append(half if mode == "SAME_UPPER" else total - half)
        after.append(total - before[-1])
    return before, after


def _stretch(b: Builder, x: Value, strides: Sequence[int]) -> Value:
    """`x` with stride - 1 zeros between neighbours along each spatial axis."""
    for axis, stride in enumerate(strides, start=2):
        extent = x.shape[axis]
        if stride == 1 or extent == 1:
            continue
        apart = reshape(b, x, [*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]])
        none = [0] * apart.rank
        after = [*none]
        after[axis + 1] = stride - 1
        padded = pad(b, apart, none, after, 0)
        merged = reshape(b, padded, [*x.shape[:axis], extent * stride, *x.shape[axis + 1 :]])
        x = cut(b, merged, axis, 0, (extent - 1) * stride + 1)
    return x


@rule("ConvInteger")
def conv_integer(b: Builder, c: Call) -> Value:
    """Convolution of 8-bit integers in int32."""
    x, w, x_zero, w_zero = c.x(0), c.x(1), c.opt(2), c.opt(3)
    return convolve(b, c, _centred(b, x, x_zero), _centred(b, w, w_zero))


def _centred(b: Builder, x: Value, zero: Value | None) -> Value:
    """`x` less its zero point in int32: padding with 0 then means what it should."""
    wide = b("Cast", x, to=TensorProto.INT32)
    if zero is None:
        return wide
    if zero.rank == 1 and zero.size > 1:
        zero = reshape(b, zero, [zero.size] + [1] * (x.rank - 1))
    return b("Sub", wide, b("Cast", zero, to=TensorProto.INT32))


@rule("QLinearConv")
def qlinear_conv(b: Builder, c: Call) -> Value:
    """Integer convolution, scaled and rounded to the output's type."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (c.x(i) for i in range(8))
    total = channel_bias(b, convolve(b, c, _centred(b, x, x_zero), _centred(b, w, w_zero)), c.opt(8))
    if w_scale.rank == 1 and w_scale.size > 1:
        w_scale = reshape(b, w_scale, [1, w_scale.size] + [1] * (x.rank - 2))
    scale = b("Div", b("Mul", x_scale, w_scale), y_scale)
    return requantise(b, b("Mul", b("Cast", total, to=TensorProto.FLOAT), scale), y_zero)


@rule("DeformConv")
def deform_conv(b: Builder, c: Call) -> Value:
    """Refused: it samples at computed positions."""
    raise Refuse("deformable convolution is not supported; export the model without it")
