"""Rewriting rules of operators that move elements without computing: shapes, slices, joins, padding."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import numpy as np
from onnx import numpy_helper

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import (
    Array,
    NodeCall,
    NodeRefused,
    Value,
    elem_type,
    normal_axis,
    numpy_dtype,
)

_MOST_JOINED = 64  # Values that a kernel joins: OpenCL devices need take no more than 128 pointers


def reshape(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    """`x` in another shape of as many elements, or itself where it has that shape."""
    return x if tuple(shape) == x.shape else b("Reshape", x, b.ints(*shape), allowzero=1)


def transpose(b: Builder, x: Value, perm: Sequence[int]) -> Value:
    """`x` with permuted axes, or itself."""
    return x if list(perm) == list(range(x.rank)) else b("Transpose", x, perm=list(perm))


def expand(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    """`x` broadcast to a shape, or itself."""
    return x if tuple(shape) == x.shape else b("Expand", x, b.ints(*shape))


def cut(b: Builder, x: Value, axis: int, start: int, end: int, step: int = 1) -> Value:
    """Return elements start, start + step, ... before end along one axis.

    `x` itself where that is all of it.
    """
    if (start, step) == (0, 1) and end >= x.shape[axis]:
        return x
    return b("Slice", x, b.ints(start), b.ints(end), b.ints(axis), b.ints(step))


def backwards(b: Builder, x: Value, axis: int) -> Value:
    """Return all elements along an axis in reverse order."""
    return b("Slice", x, b.ints(-1), b.ints(-x.shape[axis] - 1), b.ints(axis), b.ints(-1))


def join(b: Builder, parts: Sequence[Value], axis: int) -> Value:
    """Return parts joined along an axis, at most _MOST_JOINED at once; empty ones are left out."""
    kept = [p for p in parts if p.size] or list(parts[:1])
    while len(kept) > _MOST_JOINED:
        groups = (kept[n : n + _MOST_JOINED] for n in range(0, len(kept), _MOST_JOINED))
        kept = [group[0] if len(group) == 1 else b("Concat", *group, axis=axis) for group in groups]
    return kept[0] if len(kept) == 1 else b("Concat", *kept, axis=axis)


def pick(b: Builder, x: Value, axis: int, place: int) -> Value:
    """Element `place` along an axis, which is dropped."""
    return without_axes(b, cut(b, x, axis, place, place + 1), [axis])


def with_axis(b: Builder, x: Value, axis: int) -> Value:
    """`x` with another axis, of 1, before `axis`."""
    return reshape(b, x, [*x.shape[:axis], 1, *x.shape[axis:]])


def without_axes(b: Builder, x: Value, axes: Container[int]) -> Value:
    """`x` without axes of 1."""
    return reshape(b, x, [d for i, d in enumerate(x.shape) if i not in axes])


def flatten_at(b: Builder, x: Value, axis: int) -> Value:
    """`x` in two dimensions, split at an axis."""
    return reshape(b, x, [math.prod(x.shape[:axis]), math.prod(x.shape[axis:])])


def along(array: Array, axis: int, rank: int) -> Array:
    """Return one-dimensional data shaped to broadcast along an axis of a tensor of `rank` dimensions."""
    return array.reshape([-1] + [1] * (rank - axis - 1))


def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the distance, in elements, between neighbours along each axis."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def pad(b: Builder, x: Value, before: Sequence[int], after: Sequence[int], fill: float) -> Value:
    """`x` with constant elements around it; amounts are per axis and not negative."""
    if not any(before) and not any(after):
        return x
    return b("Pad", x, b.ints(*before, *after), b.like(fill, x))


def cut_negative(
    b: Builder, x: Value, before: Sequence[int], after: Sequence[int]
) -> tuple[Value, list[int], list[int]]:
    """Return `x` cut by the negative amounts per axis, and the amounts that remain to pad."""
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        x = cut(b, x, axis, max(0, -low), x.shape[axis] - max(0, -high))
    return x, [max(0, v) for v in before], [max(0, v) for v in after]


def pad_axis(b: Builder, x: Value, axis: int, before: int, after: int) -> Value:
    """`x` with zeros before and after it along one axis."""
    low, high = ([n if i == axis else 0 for i in range(x.rank)] for n in (before, after))
    return pad(b, x, low, high, 0)


@rule("Reshape")
def reshape_rule(b: Builder, c: NodeCall) -> Value:
    """A constant shape, with -1 and 0 resolved."""
    x = c.x()
    wanted = c.ints("shape") if c.opset < 5 else c.numbers(1, "shape")
    if wanted is None:
        raise NodeRefused("its shape is missing")
    if not c.integer("allowzero"):
        if any(v == 0 and i >= x.rank for i, v in enumerate(wanted)):
            raise NodeRefused(f"its shape {wanted} copies a dimension the input does not have")
        wanted = [x.shape[i] if v == 0 else v for i, v in enumerate(wanted)]
    if -1 in wanted:
        rest = math.prod(v for v in wanted if v != -1)
        if wanted.count(-1) == 1 and rest and x.size % rest == 0:
            wanted[wanted.index(-1)] = x.size // rest
    if any(v < 0 for v in wanted) or math.prod(wanted) != x.size:
        raise NodeRefused(f"its shape {wanted} does not fit a tensor of {x.size} elements")
    return reshape(b, x, wanted)


def axes_of(c: NodeCall, since: int) -> list[int] | None:
    """Return the axes, an attribute before opset `since`, input 1 after; None where they are missing."""
    return c.ints("axes") if c.opset < since else c.opt_numbers(1, "axes")


@rule("Squeeze")
def squeeze(b: Builder, c: NodeCall) -> Value:
    """Drop dimensions of size 1."""
    x, axes = c.x(), axes_of(c, 13)
    ones = [i for i, d in enumerate(x.shape) if d == 1]
    dropped = {normal_axis(a, x.rank) for a in (ones if axes is None else axes)}
    if any(x.shape[i] != 1 for i in dropped):
        raise NodeRefused(f"it squeezes axes {sorted(dropped)} of shape {list(x.shape)}, which are not all 1")
    return without_axes(b, x, dropped)


@rule("Unsqueeze")
def unsqueeze(b: Builder, c: NodeCall) -> Value:
    """Insert dimensions of size 1."""
    x, axes = c.x(), axes_of(c, 13) or []
    rank = x.rank + len(axes)
    places = {normal_axis(a, rank) for a in axes}
    if len(places) != len(axes):
        raise NodeRefused(f"its axes {axes} name one dimension twice")
    rest = iter(x.shape)
    return reshape(b, x, [1 if i in places else next(rest) for i in range(rank)])


@rule("Flatten")
def flatten(b: Builder, c: NodeCall) -> Value:
    """Two dimensions, split at an axis."""
    x = c.x()
    return flatten_at(b, x, normal_axis(c.integer("axis", 1), x.rank, end=True))


@rule("Transpose")
def transpose_rule(b: Builder, c: NodeCall) -> Value:
    """Permuted axes; reversed by default."""
    x = c.x()
    perm = c.ints("perm") or list(reversed(range(x.rank)))
    if sorted(perm) != list(range(x.rank)):
        raise NodeRefused(f"perm {perm} is no permutation of {x.rank} axes")
    return transpose(b, x, perm)


@rule("Shape")
def shape(b: Builder, c: NodeCall) -> Value:
    """A constant, known while compiling."""
    dims = list(c.x().shape)
    end = c.attrs.get("end")
    return b.ints(*dims[c.integer("start") : None if end is None else int(end)])


@rule("Size")
def size(b: Builder, c: NodeCall) -> Value:
    """A constant, known while compiling."""
    return b.constant(np.array(c.x().size, np.int64))


@rule("Concat")
def concat(b: Builder, c: NodeCall) -> Value:
    """Concatenation along an axis."""
    parts = c.tensors()
    return join(b, parts, normal_axis(c.integer("axis", 1), parts[0].rank))


@rule("Split")
def split(b: Builder, c: NodeCall) -> list[Value]:
    """Slices along one axis."""
    x = c.x()
    axis = normal_axis(c.integer("axis"), x.rank)
    sizes = c.ints("split") if c.opset < 13 else None
    sizes = c.opt_numbers(1, "split") if sizes is None else sizes
    if sizes is None:
        count = c.integer("num_outputs", len(c.node.output))
        chunk = -(-x.shape[axis] // count)
        sizes = [max(0, min(chunk, x.shape[axis] - i * chunk)) for i in range(count)]
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise NodeRefused(f"it splits {x.shape[axis]} elements into {sizes}")
    return pieces(b, x, axis, sizes)


def pieces(b: Builder, x: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Return consecutive parts of these sizes along an axis."""
    ends = list(np.cumsum(sizes))
    return [cut(b, x, axis, int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]


@rule("Slice")
def slice_rule(b: Builder, c: NodeCall) -> Value:
    """A slice with constant starts, ends, axes and steps, clamped to the shape."""
    x = c.x()
    if c.opset < 10:
        starts, ends, axes, steps = c.ints("starts") or [], c.ints("ends") or [], c.ints("axes"), None
    else:
        starts, ends = c.numbers(1, "starts"), c.numbers(2, "ends")
        axes, steps = c.opt_numbers(3, "axes"), c.opt_numbers(4, "steps")
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise NodeRefused("its starts, ends, axes and steps differ in length")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        place = normal_axis(axis, x.rank)
        if step == 0:
            raise NodeRefused("its step is 0")
        first, last = _clamp(start, end, step, x.shape[place])
        if step > 0:
            x = cut(b, x, place, first, last, step)
        else:
            past = last if last >= 0 else -x.shape[place] - 1  # The place before the first element
            x = b("Slice", x, b.ints(first), b.ints(past), b.ints(place), b.ints(step))
    return x


def _clamp(start: int, end: int, step: int, extent: int) -> tuple[int, int]:
    """Return start and end as ONNX clamps them.

    End is -1 where a backward slice includes the first element.
    """
    start, end = (v + extent if v < 0 else v for v in (start, end))
    if step > 0:
        return min(max(start, 0), extent), min(max(end, 0), extent)
    return min(max(start, 0), extent - 1), min(max(end, -1), extent - 1)


@rule("Expand")
def expand_rule(b: Builder, c: NodeCall) -> Value:
    """Bidirectional broadcasting to a shape."""
    x = c.x()
    wanted = c.numbers(1, "shape")
    try:
        return expand(b, x, np.broadcast_shapes(x.shape, tuple(wanted)))
    except ValueError:
        raise NodeRefused(f"shape {list(x.shape)} does not broadcast to {wanted}") from None


@rule("Tile")
def tile(b: Builder, c: NodeCall) -> Value:
    """A new axis before each repeated one, broadcast, and merged."""
    x = c.x()
    if c.opset < 6:
        raise NodeRefused("its form before opset 6 is not supported; export with a newer opset")
    repeats = c.numbers(1, "repeats")
    if len(repeats) != x.rank or min(repeats, default=0) < 0:
        raise NodeRefused(f"its repeats {repeats} do not fit a tensor of {x.rank} dimensions")
    apart = [d for extent in x.shape for d in (1, extent)]
    wide = [d for times, extent in zip(repeats, x.shape, strict=True) for d in (times, extent)]
    merged = [times * extent for times, extent in zip(repeats, x.shape, strict=True)]
    return reshape(b, expand(b, reshape(b, x, apart), wide), merged)


@rule("Constant")
def constant(b: Builder, c: NodeCall) -> Value:
    """A constant, known while compiling."""
    name, given = next(iter(c.attrs.items()), ("", None))
    if name == "value":
        return b.constant(numpy_helper.to_array(given), hint=c.node.output[0])
    if name in ("value_float", "value_floats"):
        return b.constant(given, np.float32, hint=c.node.output[0])
    if name in ("value_int", "value_ints"):
        return b.constant(given, np.int64, hint=c.node.output[0])
    raise NodeRefused(f"its value is given as {name or 'nothing'}, which honed does not carry")


@rule("ConstantOfShape")
def constant_of_shape(b: Builder, c: NodeCall) -> Value:
    """A constant, known while compiling."""
    dims = c.numbers(0, "shape")
    value = numpy_helper.to_array(c.attrs["value"]) if "value" in c.attrs else np.zeros(1, np.float32)
    return expand(b, b.constant(value.reshape([1] * len(dims))), dims)


@rule("EyeLike")
def eye_like(b: Builder, c: NodeCall) -> Value:
    """A constant, known while compiling."""
    x = c.x()
    if x.rank != 2:
        raise NodeRefused("its input does not have two dimensions")
    dtype = numpy_dtype(c.integer("dtype")) if "dtype" in c.attrs else x.dtype
    return b.constant(np.eye(x.shape[0], x.shape[1], k=c.integer("k")).astype(dtype))


@rule("Trilu")
def trilu(b: Builder, c: NodeCall) -> Value:
    """A constant mask over the last two axes."""
    x = c.x()
    (diagonal, *_) = c.opt_numbers(1, "k") or [0]
    ones = np.ones(x.shape[-2:], np.bool_)
    mask = np.triu(ones, diagonal) if c.integer("upper", 1) else np.tril(ones, diagonal)
    return b("Where", b.constant(mask), x, 0)


@rule("DepthToSpace", "SpaceToDepth")
def depth_space(b: Builder, c: NodeCall) -> Value:
    """Blocks between channels and space, by reshape and transpose (ONNX's definitions)."""
    x, block = c.x(), c.integer("blocksize")
    if x.rank != 4 or block < 1:
        raise NodeRefused("its input does not have four dimensions")
    n, ch, h, w = x.shape
    if c.op == "SpaceToDepth":
        apart = reshape(b, x, [n, ch, h // block, block, w // block, block])
        return reshape(b, transpose(b, apart, [0, 3, 5, 1, 2, 4]), [n, ch * block**2, h // block, w // block])
    depth = ch // block**2
    if c.text("mode", "DCR") == "DCR":
        moved = transpose(b, reshape(b, x, [n, block, block, depth, h, w]), [0, 3, 4, 1, 5, 2])
    else:
        moved = transpose(b, reshape(b, x, [n, depth, block, block, h, w]), [0, 1, 4, 2, 5, 3])
    return reshape(b, moved, [n, depth, h * block, w * block])


@rule("Pad")
def pad_rule(b: Builder, c: NodeCall) -> Value:
    """Pad for constants; gathers along each axis for other modes; slices for negative amounts."""
    x = c.x()
    before, after = _amounts(c, x.rank)
    mode = c.text("mode", "constant")
    x, before, after = cut_negative(b, x, before, after)
    if mode == "constant":
        return _constant_pad(b, c, x, before, after)
    for axis in range(x.rank):
        if before[axis] or after[axis]:
            places = _source_places(mode, x.shape[axis], before[axis], after[axis])
            x = b("Gather", x, b.constant(places), axis=axis)
    return x


def _constant_pad(b: Builder, c: NodeCall, x: Value, before: list[int], after: list[int]) -> Value:
    fill: Value | None = b.like(c.number("value", 0.0), x) if c.opset < 11 else c.opt(2)
    if fill is None:
        fill = b.like(0, x)
    if not any(before) and not any(after):
        return x
    amounts = b.ints(*before, *after)
    scalar = reshape(b, fill, [])
    if x.dtype.kind == "b":
        small = b("Pad", b("Cast", x, to=3), amounts, b("Cast", scalar, to=3))
        return b("Cast", small, to=elem_type(x.dtype))
    if scalar.data is not None:
        return b("Pad", x, amounts, scalar)
    outside = b("Pad", b.constant(np.zeros(x.shape, np.bool_)), amounts, b.constant(np.array(True)))
    return b("Where", outside, scalar, b("Pad", x, amounts, b.like(0, x)))


def _amounts(c: NodeCall, rank: int) -> tuple[list[int], list[int]]:
    given = c.ints("pads" if c.opset >= 2 else "paddings") if c.opset < 11 else c.numbers(1, "pads")
    wanted = c.opt_numbers(3, "axes") if c.opset >= 18 else None
    axes = [normal_axis(a, rank) for a in (range(rank) if wanted is None else wanted)]
    if given is None or len(given) != 2 * len(axes):
        raise NodeRefused(f"its pads {given} do not fit {len(axes)} axes")
    before, after = [0] * rank, [0] * rank
    for index, axis in enumerate(axes):
        before[axis], after[axis] = given[index], given[index + len(axes)]
    return before, after


def _source_places(mode: str, extent: int, before: int, after: int) -> Array:
    """Return, for each output position along an axis, the input position it copies."""
    places = np.arange(-before, extent + after)
    if mode == "edge":
        return np.clip(places, 0, extent - 1)
    if mode == "wrap":
        return places % extent
    if mode != "reflect":
        raise NodeRefused(f"padding mode {mode!r} does not exist")
    if extent == 1:
        return np.zeros_like(places)
    period = 2 * (extent - 1)
    folded = places % period
    return np.where(folded < extent, folded, period - folded)


@rule("CenterCropPad")
def center_crop_pad(b: Builder, c: NodeCall) -> Value:
    """The input, cropped or padded around the centre of each axis to a constant size."""
    x = c.x()
    sizes = c.numbers(1, "shape")
    axes = [normal_axis(a, x.rank) for a in c.ints("axes") or range(x.rank)]
    for axis, size in zip(axes, sizes, strict=True):
        extra, missing = x.shape[axis] - size, size - x.shape[axis]
        if extra > 0:
            x = cut(b, x, axis, extra // 2, extra // 2 + size)
        elif missing > 0:
            x = pad_axis(b, x, axis, missing // 2, missing - missing // 2)
    return x
