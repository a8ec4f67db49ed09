"""Gathers and scatters.

The core set has one operator that reads at computed places, Gather, which the importer clamps into range. All
else is written with it, and scatters are turned around: each output element looks for the update meant for
it. So no index, however wrong, reads or writes outside a buffer, and no two writes race.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import Array, NodeCall, NodeRefused, Value, elem_type, normal_axis

from .layout import along, cut, expand, pad, pick, reshape, strides_of, transpose, with_axis
from .reduction import reduce

MAX_RANGE = 1 << 23  # Elements of a constant made by Range
MAX_WORK = 1 << 33  # Comparisons one rewritten scatter may cost
BEST_PLACES = "Scan"  # Represents a sort in a normalised graph: see `_best_places`
# Elements of a row, and comparisons in all, up to which counting ranks is quicker than sorting.
_PAIRS, _PAIRS_IN_ALL = 512, 1 << 26
_SCANNED = 64  # Elements of a running total that are compared with each other
_VALUES = "the shape of its output depends on the values of its inputs; honed compiles static shapes only"


def wrap_indices(b: Builder, indices: Value, extent: int, what: str = "index") -> Value:
    """Return indices counted from the front; requests with one out of range are not served.

    Constant ones are checked here: raises NodeRefused for one out of range.
    """
    if indices.data is not None:
        if indices.size and (indices.data.min() < -extent or indices.data.max() >= extent):
            raise NodeRefused(f"its constant {what} is out of range for {extent} elements")
        counted = np.where(indices.data < 0, indices.data + extent, indices.data)
        return b.constant(counted.astype(indices.dtype))
    b.rely(indices, -extent, extent - 1, f"indices into {extent} elements")
    return _count_from_front(b, indices, extent)


def _count_from_front(b: Builder, indices: Value, extent: int) -> Value:
    """Return indices counted from the front, also for negative ones, which count from the end."""
    negative = b("Less", indices, 0)
    return b("Where", negative, b("Add", indices, extent), indices)


@rule("Gather")
def gather(b: Builder, c: NodeCall) -> Value:
    """Slices at indices along an axis; one constant index is a slice."""
    x = c.x(0)
    axis = normal_axis(c.integer("axis"), x.rank)
    indices = wrap_indices(b, c.x(1), x.shape[axis])
    if indices.data is not None and indices.size:
        values = indices.data.reshape(-1)
        start, step = int(values[0]), int(values[1] - values[0]) if values.size > 1 else 1
        if step > 0 and np.array_equal(values, start + step * np.arange(values.size)):
            taken = cut(b, x, axis, start, int(values[-1]) + 1, step)
            return reshape(b, taken, [*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])
    return b("Gather", x, indices, axis=axis)


def gather_elements(b: Builder, x: Value, indices: Value, axis: int) -> Value:
    """`x` at `indices` (counted from the front) along an axis, every other coordinate kept."""
    strides, wide = strides_of(x.shape), b.cast(indices, np.int64)
    starts = [
        along(np.arange(extent), i, indices.rank) * strides[i]
        for i, extent in enumerate(indices.shape)
        if i != axis and extent > 1
    ]
    # A single constant serves all axes, unless it is large.
    bases = starts if indices.size > MAX_RANGE else [sum(starts, np.zeros(indices.shape, np.int64))]
    # The clamp keeps a wrong index from reaching into a neighbouring row as well as out of the buffer.
    bounded = b("Min", b("Max", wide, 0), x.shape[axis] - 1)
    places = b("Mul", bounded, strides[axis])
    for base in bases:
        places = b("Add", places, b.constant(base)) if base.any() else places
    return b("Gather", reshape(b, x, [x.size]), places, axis=0)


@rule("GatherElements")
def gather_elements_rule(b: Builder, c: NodeCall) -> Value:
    """The elements of one axis at the indices."""
    x = c.x(0)
    axis = normal_axis(c.integer("axis"), x.rank)
    return gather_elements(b, x, wrap_indices(b, c.x(1), x.shape[axis]), axis)


@rule("GatherND")
def gather_nd(b: Builder, c: NodeCall) -> Value:
    """Slices at tuples of indices, after `batch_dims` shared axes."""
    x, indices, batch = c.x(0), c.x(1), c.integer("batch_dims")
    depth = indices.shape[-1]
    inner = x.shape[batch + depth :]
    outer = math.prod(x.shape[:batch])
    rows = math.prod(x.shape[batch : batch + depth])
    places = _linear(b, indices, x.shape[batch : batch + depth])
    places = reshape(b, places, [outer, places.size // outer])
    if outer > 1:
        places = b("Add", places, b.constant((np.arange(outer, dtype=np.int64) * rows).reshape(-1, 1)))
    taken = b("Gather", reshape(b, x, [outer * rows, *inner]), places, axis=0)
    return reshape(b, taken, [*indices.shape[:-1], *inner])


def _linear(b: Builder, indices: Value, shape: Sequence[int]) -> Value:
    """Return flat positions of the tuples along the last axis of `indices` in a tensor of `shape`, int64."""
    total: Value | None = None
    most = max(shape, default=1)
    if indices.data is None:  # A precondition has one range for all columns
        b.rely(indices, -most, most - 1, f"tuples of indices into {list(shape)}")
    for i, (extent, stride) in enumerate(zip(shape, strides_of(shape), strict=True)):
        picked = pick(b, indices, indices.rank - 1, i)
        count = wrap_indices if picked.data is not None else _count_from_front
        column = b.cast(count(b, picked, extent), np.int64)
        column = b("Min", b("Max", column, 0), extent - 1)
        part = b("Mul", column, stride) if stride != 1 else column
        total = part if total is None else b("Add", total, part)
    return b.constant(np.zeros(indices.shape[:-1], np.int64)) if total is None else total


@rule("Scatter", "ScatterElements")
def scatter_elements_rule(b: Builder, c: NodeCall) -> Value:
    """Updates along an axis."""
    x = c.x(0)
    axis = normal_axis(c.integer("axis"), x.rank)
    return scatter_elements(
        b, x, wrap_indices(b, c.x(1), x.shape[axis]), c.x(2), axis, c.text("reduction", "none")
    )


def scatter_elements(
    b: Builder, x: Value, indices: Value, updates: Value, axis: int, reduction: str
) -> Value:
    """`x` with `updates` put (or added, ...) at `indices` along an axis; of several, the last wins."""
    if indices.data is not None and reduction == "none":
        grid = list(np.indices(indices.shape))
        grid[axis] = indices.data
        return _by_map(b, x, updates, np.ravel_multi_index(tuple(grid), x.shape))
    order = [i for i in range(x.rank) if i != axis] + [axis]
    data, idx, upd = (transpose(b, v, order) for v in (x, indices, updates))
    wide, none = b.cast(idx, np.int64), [0] * data.rank
    missing = [d - i for d, i in zip(data.shape[:-1], idx.shape[:-1], strict=True)] + [0]
    wide, upd = pad(b, wide, none, missing, -1), pad(b, upd, none, missing, 0)
    rows, width, slots = math.prod(data.shape[:-1]), data.shape[-1], wide.shape[-1]
    result = _scatter(
        b,
        reshape(b, data, [rows, width, 1]),
        reshape(b, wide, [rows, slots]),
        reshape(b, upd, [rows, slots, 1]),
        reduction,
    )
    return transpose(b, reshape(b, result, data.shape), list(np.argsort(order)))


@rule("ScatterND")
def scatter_nd(b: Builder, c: NodeCall) -> Value:
    """Slices written (or added, ...) at tuples of indices."""
    x, indices, updates = c.x(0), c.x(1), c.x(2)
    depth, reduction = indices.shape[-1], c.text("reduction", "none")
    slots, rows = math.prod(indices.shape[:-1]), math.prod(x.shape[:depth])
    inner = x.size // rows
    if indices.data is not None:
        for i, extent in enumerate(x.shape[:depth]):
            wrap_indices(b, b.constant(indices.data[..., i]), extent)
    places = reshape(b, _linear(b, indices, x.shape[:depth]), [slots])
    if places.data is not None and reduction == "none":
        spread = places.data[:, None] * inner + np.arange(inner)[None, :]
        return _by_map(b, x, updates, spread.reshape(-1))
    result = _scatter(
        b,
        reshape(b, x, [1, rows, inner]),
        reshape(b, places, [1, slots]),
        reshape(b, updates, [1, slots, inner]),
        reduction,
    )
    return reshape(b, result, x.shape)


def _by_map(b: Builder, x: Value, updates: Value, places: Array) -> Value:
    """Return the result for known places: one gather from data and updates laid end to end."""
    source = np.arange(x.size, dtype=np.int64)
    source[places.reshape(-1)] = x.size + np.arange(updates.size)
    if updates.size == x.size and np.array_equal(source, x.size + np.arange(x.size)):
        return reshape(b, updates, x.shape)
    both = b("Concat", reshape(b, x, [x.size]), reshape(b, updates, [updates.size]), axis=0)
    return b("Gather", both, b.constant(source.reshape(x.shape)), axis=0)


def _scatter(b: Builder, x: Value, places: Value, updates: Value, reduction: str) -> Value:
    """`x` [rows, width, inner], places [rows, slots], updates [rows, slots, inner]."""
    rows, width, inner = x.shape
    slots = places.shape[1]
    if rows * width * slots * (1 if reduction == "none" else inner) > MAX_WORK:
        raise NodeRefused(f"it scatters {slots} updates over {width} places, too many to search")
    meant = b("Equal", reshape(b, places, [rows, slots, 1]), b.constant(np.arange(width, dtype=np.int64)))
    if reduction == "none":
        order = b.constant(np.arange(slots, dtype=np.int64).reshape(1, slots, 1))
        last = reduce(b, "ReduceMax", b("Where", meant, order, -1), [1], keepdims=False)
        flat = b("Max", last, 0)
        if rows > 1:
            flat = b("Add", flat, b.constant((np.arange(rows, dtype=np.int64) * slots).reshape(rows, 1)))
        chosen = b("Gather", reshape(b, updates, [rows * slots, inner]), flat, axis=0)
        found = reshape(b, b("Less", last, 0), [rows, width, 1])
        return b("Where", found, x, chosen)
    neutral, fold, combine = _reduction(x, reduction)
    spread = b(
        "Where",
        reshape(b, meant, [rows, slots, width, 1]),
        reshape(b, updates, [rows, slots, 1, inner]),
        neutral,
    )
    return b(combine, x, reduce(b, fold, spread, [1], keepdims=False))


def _reduction(x: Value, name: str) -> tuple[float, str, str]:
    """Return the neutral element, the reduction of updates, and the operator to combine it with the data."""
    low, high = (-np.inf, np.inf) if x.is_float else (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
    table = {
        "add": (0, "ReduceSum", "Add"),
        "mul": (1, "ReduceProd", "Mul"),
        "max": (low, "ReduceMax", "Max"),
        "min": (high, "ReduceMin", "Min"),
    }
    if name not in table:
        raise NodeRefused(f"its reduction {name!r} does not exist")
    return table[name]


@rule("OneHot")
def one_hot(b: Builder, c: NodeCall) -> Value:
    """A comparison of each index with every position; an index out of range matches none."""
    indices, values = c.x(0), c.x(2)
    (depth, *_) = c.numbers(1, "depth")
    axis = normal_axis(c.integer("axis", -1), indices.rank + 1)
    whole = b.cast(indices, np.int64)
    whole = _count_from_front(b, whole, depth)
    places = along(np.arange(depth, dtype=np.int64), axis, indices.rank + 1)
    hit = b("Equal", with_axis(b, whole, axis), b.constant(places))
    off, on = pick(b, values, 0, 0), pick(b, values, 0, 1)
    return b("Where", hit, on, off)


@rule("TopK")
def top_k(b: Builder, c: NodeCall) -> list[Value]:
    """The best elements in order; ties go to the lower index, and NaN counts as the worst number."""
    x = c.x()
    axis = normal_axis(c.integer("axis", -1), x.rank)
    count = c.integer("k") if c.opset < 10 else c.numbers(1, "k")[0]
    size = x.shape[axis]
    if not 0 <= count <= size:
        raise NodeRefused(f"it takes the best {count} of {size} elements, which is not possible")
    order = [i for i in range(x.rank) if i != axis] + [axis]
    moved = transpose(b, x, order)
    rows = reshape(b, moved, [moved.size // size if size else 0, size])
    largest = bool(c.integer("largest", 1))
    if not rows.size or not count:
        places = b.constant(np.zeros((rows.shape[0], count), np.int64))
    elif size <= _PAIRS and rows.size * size <= _PAIRS_IN_ALL:
        places = _places_by_pairs(b, rows, count, largest=largest)
    else:
        places = _best_places(b, rows, count, largest=largest)
    best = gather_elements(b, rows, places, 1)
    back, shape = list(np.argsort(order)), [*moved.shape[:-1], count]
    return [transpose(b, reshape(b, v, shape), back) for v in (best, places)]


def _places_by_pairs(b: Builder, rows: Value, count: int, *, largest: bool) -> Value:
    """Return the place of each rank; ranks are found by counting."""
    size = rows.shape[1]
    if rows.is_float:
        rows = b("Where", b("IsNaN", rows), -np.inf if largest else np.inf, rows)
    mine, other = reshape(b, rows, [*rows.shape, 1]), reshape(b, rows, [rows.shape[0], 1, size])
    ahead = b("Less", mine, other) if largest else b("Less", other, mine)
    earlier = b.constant(np.tril(np.ones((size, size), np.bool_), -1))
    before = b("Or", ahead, b("And", b("Equal", mine, other), earlier))
    rank = reduce(b, "ReduceSum", b("Cast", before, to=TensorProto.INT32), [2])  # Shape [rows, size, 1]
    wanted = b.constant(np.arange(count, dtype=np.int32))
    numbers = b.constant(np.arange(size, dtype=np.int64).reshape(1, size, 1))
    return reduce(b, "ReduceSum", b("Where", b("Equal", rank, wanted), numbers, 0), [1], keepdims=False)


def _best_places(b: Builder, rows: Value, count: int, *, largest: bool) -> Value:
    """Return a Scan over rows whose body is a TopK, the only ONNX construct with the places as its output.

    The importer turns it into a sort.
    """
    body = helper.make_graph(
        [helper.make_node("TopK", ["row", "k"], ["best", "places"], axis=0, largest=int(largest))],
        "best",
        [onnx.ValueInfoProto(name="row")],
        [helper.make_tensor_value_info("places", TensorProto.INT64, [count])],
        [numpy_helper.from_array(np.array([count], np.int64), "k")],
    )
    return b(BEST_PLACES, rows, body=body, num_scan_inputs=1)


@rule("CumSum", "CumProd")
def running_total(b: Builder, c: NodeCall) -> Value:
    """Sums, or products, of all elements up to each."""
    x = c.x()
    axis = normal_axis(c.numbers(1, "axis")[0], x.rank)
    apart = reshape(b, x, [math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])])
    fold, join, neutral = ("ReduceSum", "Add", 0) if c.op == "CumSum" else ("ReduceProd", "Mul", 1)
    reverse, exclusive = bool(c.integer("reverse")), bool(c.integer("exclusive"))

    def scan(x: Value, *, exclusive: bool) -> Value:
        """Return totals of blocks, by comparing places, plus those of all earlier blocks (Blelloch 1990)."""
        outer, size, inner = x.shape
        block = min(size, _SCANNED)
        count = -(-size // block)
        whole = pad(b, x, [0, 0, 0], [0, count * block - size, 0], neutral)
        blocks = reshape(b, whole, [outer, count, block, inner])
        places = np.arange(block)
        before = places[None, :] < places[:, None] + (not exclusive)
        mask = b.constant((before[::-1, ::-1] if reverse else before).reshape(block, block, 1))
        each = b("Where", mask, reshape(b, blocks, [outer, count, 1, block, inner]), neutral)
        found = reduce(b, fold, each, [3], keepdims=False)
        if count > 1:
            totals = reduce(b, fold, blocks, [2], keepdims=False)
            behind = scan(totals, exclusive=True)
            found = b(join, found, reshape(b, behind, [outer, count, 1, inner]))
        return cut(b, reshape(b, found, [outer, count * block, inner]), 1, 0, size)

    return reshape(b, scan(apart, exclusive=exclusive), x.shape) if x.size else x


@rule("ReverseSequence")
def reverse_sequence(b: Builder, c: NodeCall) -> Value:
    """The first `sequence_lens[i]` steps of each sequence, reversed."""
    x, lengths = c.x(0), c.x(1)
    time, batch = normal_axis(c.integer("time_axis"), x.rank), normal_axis(c.integer("batch_axis", 1), x.rank)
    b.rely(lengths, 0, x.shape[time], "lengths of its sequences")
    step = b.constant(np.arange(x.shape[time], dtype=np.int64).reshape(_one_axis(x, time)))
    length = reshape(b, b("Cast", lengths, to=TensorProto.INT64), _one_axis(x, batch))
    mirrored = b("Sub", b("Sub", length, 1), step)
    places = b("Where", b("Less", step, length), mirrored, step)
    return gather_elements(b, x, expand(b, places, x.shape), time)


def _one_axis(x: Value, axis: int) -> list[int]:
    """Return the shape that broadcasts over `x` along all axes but one."""
    return [extent if n == axis else 1 for n, extent in enumerate(x.shape)]


@rule("Compress")
def compress(b: Builder, c: NodeCall) -> Value:
    """Slices selected by a constant mask."""
    x = c.x()
    chosen = np.flatnonzero(c.const(1, "condition")).astype(np.int64)
    if "axis" not in c.attrs:
        x = reshape(b, x, [x.size])
    axis = normal_axis(c.integer("axis"), x.rank)
    return b("Gather", x, wrap_indices(b, b.constant(chosen), x.shape[axis], "condition"), axis=axis)


@rule("NonZero", "Unique", "NonMaxSuppression")
def refuse_dynamic(b: Builder, c: NodeCall) -> Value:
    """Refused: the number of results depends on values."""
    raise NodeRefused(_VALUES)


@rule("Range")
def value_range(b: Builder, c: NodeCall) -> Value:
    """A constant; refused if the number of results depends on values."""
    values = [c.x(i).data for i in range(3)]
    if any(v is None or v.size != 1 for v in values):
        raise NodeRefused(_VALUES)
    start, limit, delta = (v.reshape(-1)[0] for v in values if v is not None)
    count = max(0, math.ceil((float(limit) - float(start)) / float(delta))) if delta else MAX_WORK
    if count > MAX_RANGE:
        raise NodeRefused(f"it counts {count} steps, more than {MAX_RANGE}")
    return b.constant((start + np.arange(count) * delta).astype(c.x(0).dtype))


@rule("TensorScatter")
def tensor_scatter(b: Builder, c: NodeCall) -> Value:
    """Rows of a cache replaced, from a given position for each sample."""
    cache, update, start = c.x(0), c.x(1), c.opt(2)
    axis = normal_axis(c.integer("axis", -2), cache.rank)
    extent, steps = cache.shape[axis], update.shape[axis]
    places = b.constant(np.arange(steps, dtype=np.int64).reshape(_one_axis(update, axis)))
    circular = c.text("mode", "linear") == "circular"
    if start is not None:
        most = np.iinfo(np.int32).max if circular else extent - steps
        b.rely(start, 0, most, "rows of its cache")
        first = b("Cast", start, to=elem_type(places.dtype))
        places = b("Add", places, reshape(b, first, [start.size] + [1] * (cache.rank - 1)))
    if circular:
        places = b("Mod", places, extent)
    return scatter_elements(b, cache, expand(b, places, update.shape), update, axis, "none")
