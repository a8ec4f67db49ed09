"""Sketches for tensors whose channels lie in blocks, on processors: blocked, separable, and their table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from honed.tuner.search.parts import (
    CHOICES,
    BlockInfo,
    Keep,
    SketchLimits,
    accumulate,
    below,
    blocks,
    calls,
    compute_in,
    contraction,
    fuse,
    launch_others,
    part_of,
    reads_along,
    require,
    sample_tile,
    sketch,
    unroll,
)
from honed.tuner.search.traces import ScheduleTrace, divisors

# The blocked sketch: convolutions of tensors whose channels lie in blocks. For processors. A work-item
# computes a rectangle of pixels for a few vectors of output channels. Each vector of weights is loaded once
# for all pixels of the rectangle, each pixel broadcast once for all vectors; of a depthwise convolution
# pixels are vectors as weights are. What the rectangle needs of the image is padded in private memory, block
# by block of input channels, and read again for each step of the window.

_AXES = 5  # Axes of the result: images, blocks of channels, rows, columns, the channels of a block
_WINDOW_AXES = 2
_MOST_VECTORS = 28  # Vectors of accumulators: of 32 registers, the others hold weights and pixels
_MOST_BESIDE = 4  # Vectors of channels that share the pixels


@sketch(50)
def tile_blocked(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Tile a convolution of blocked tensors."""
    require(limits.groups_of_one)
    before, rest = contraction(schedule, Keep.PADDING)
    main = rest[0]
    depthwise = _is_depthwise(schedule, main, most)
    groups, outside, unrolled, vector = _split(schedule, main, limits, depthwise=depthwise)
    schedule.reorder(*groups, *outside, *unrolled, vector)
    group = fuse(schedule, groups)
    schedule.bind(group, "blockIdx.x")
    tail = accumulate(schedule, rest)
    schedule.reverse_compute_at(tail, group, preserve_unit_loops=True)
    *written, lanes = below(schedule, tail, group)
    unroll(schedule, [*written, *unrolled])
    schedule.vectorize(lanes)
    schedule.vectorize(vector)
    padded = [part for part in before if len(part.extents) == _AXES and part.extents[-1] == most]
    for part in padded:
        compute_in(schedule, part.block, group if depthwise else outside[0], "local")
        schedule.vectorize(schedule.get_loops(part.block)[-1])
    schedule.decompose_reduction(main.block, outside[0])
    launch_others(schedule, [p for p in before if p not in padded], rest, limits, most)


def _is_depthwise(schedule: Schedule, main: BlockInfo, lanes: int) -> bool:
    """Return whether a blocked convolution computes each channel by itself.

    Raises NotApplicable if the block is no such convolution.
    """
    extents, spatial = main.extents, main.spatial
    require(spatial == list(range(_AXES)) and extents[_AXES - 1] == lanes and len(extents) >= _AXES + 2)
    reads = [frozenset(reads_along(schedule, main.block, n)) for n in spatial]
    _, channels, *pixels, lane = reads
    require(len(schedule.get(main.block).reads) == 2 and pixels[0] == pixels[1] and len(pixels[0]) == 1)
    (weights,) = {0, 1} - pixels[0]
    require(weights in lane and channels == lane)
    return len(lane) == 2


def _split(
    schedule: Schedule, main: BlockInfo, limits: SketchLimits, *, depthwise: bool
) -> tuple[list[LoopRV], list[LoopRV], list[LoopRV], LoopRV]:
    """Split the axes; sample the size of the rectangle.

    Return the loops of groups, those of the sum, those to unroll, and the lanes.
    """
    images, channels, rows, columns, lanes, *summed = schedule.get_loops(main.block)
    channels, beside, _ = sample_tile(schedule, channels, 1 if depthwise else _MOST_BESIDE)
    rows, down, _ = sample_tile(schedule, rows, _MOST_VECTORS)
    columns, across, _ = sample_tile(schedule, columns, _MOST_VECTORS)
    # Registers hold the sums, so that no pixel is kept from one step of a window to the next
    if not depthwise:
        blocks, *window = summed
        summed = [blocks, *window] if len(window) > _WINDOW_AXES else [*window, blocks]
        outer, inside, _ = sample_tile(schedule, summed[-1], limits.unroll)
        summed = [*summed[:-1], outer, inside]
    *outside, inside = summed
    return [images, rows, channels, columns], outside, [inside, down, across, beside], lanes


# Rectangles that do well on processors; docs/dev/measurements.md compares them with others.

_DEEP = 10  # Accumulators, below which the processor waits for its own sums
_SUMS = 4  # Unrolled steps of a sum
_FEW_GROUPS = 2  # Number of work-groups that is worth half as much as enough of them
_DEPTHWISE_WINDOW = 3  # Window of a depthwise convolution, as most have
_MOST_PIXELS, _MOST_ROWS = 16, 2  # Vectors and rows of a depthwise convolution's rectangle
_TALL = 0.9  # Worth of more rows, as a factor
_COPIED = 2  # A padded pixel is read and written

# Steps of sketches that reduce.
_COMPUTING = {"ComputeAt", "ReverseComputeAt", "DecomposeReduction", "RFactor", "CacheWrite", "SetScope"}


def blocked_rectangle(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch with the best rectangle to cut its image into; None where it is of another kind."""
    names, tiles = sketch.names, sketch.tiles
    if len(tiles) not in (3, 4) or "TransformLayout" in names or sketch.by_groups:
        return None
    (_, beside), (_, rows), (_, columns), *_ = tiles
    if not rows.most == columns.most == _MOST_VECTORS:
        return None
    extents = (beside.extent, rows.extent, columns.extent)
    if names.count("DecomposeReduction") > 1:
        most, worth = _MOST_VECTORS, _separable_worth
    elif beside.most == 1:
        most, worth = _MOST_PIXELS, _depthwise_worth
    else:
        most, worth = _MOST_VECTORS, _worth
    steps = max(_fitting(extents, beside.most, most), key=lambda one: (worth(one, extents), one[::-1]))
    sums = [divisors(tile.extent, _SUMS)[-1] for _, tile in tiles[len(steps) :]]
    return sketch.with_most(sketch.cut([*steps, *sums]))


def moved_lines(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch itself where it moves lines of vectors and leaves nothing open; else None."""
    names = set(sketch.names)
    lines = "Vectorize" in names and not names & _COMPUTING and not sketch.by_groups
    return sketch if lines and not sketch.decisions else None


def _fitting(extents: Sequence[int], beside: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield vectors of channels, rows and columns of rectangles of at most `most` vectors."""
    channels, rows, columns = extents
    for one in product(divisors(channels, beside), divisors(rows), divisors(columns)):
        if math.prod(one) <= most:
            yield one


def _worth(steps: Sequence[int], extents: Sequence[int]) -> float:
    """Return a score by the sums per sum and vector loaded (of weights and of pixels); larger is better."""
    beside, *pixels = steps
    count = math.prod(steps)
    groups = math.prod(extents) // count
    loaded = beside + math.prod(pixels)
    return count / (count + loaded) * min(1.0, count / _DEEP) * groups / (groups + _FEW_GROUPS)


def _separable_worth(steps: Sequence[int], extents: Sequence[int]) -> float:
    """Return the combined score of both convolutions, for work-items that have all channels."""
    if math.prod(steps[1:]) > _MOST_PIXELS:
        return 0.0
    return _worth(steps, (steps[0], *extents[1:])) * _depthwise_worth(steps, extents)


def _depthwise_worth(steps: Sequence[int], extents: Sequence[int]) -> float:
    """Return a score by the sums, relative to the sums plus the padded elements that they need."""
    _, rows, columns = steps
    sums = rows * columns * _DEPTHWISE_WINDOW**2
    padded = (rows + _DEPTHWISE_WINDOW - 1) * (columns + _DEPTHWISE_WINDOW - 1)
    tall = rows > _MOST_ROWS and rows != extents[1]
    return sums / (sums + _COPIED * padded) * (_TALL if tall else 1.0)


# The separable sketch: a depthwise convolution and the pointwise one that reads it, in one kernel. For
# processors, of tensors whose channels lie in blocks. A work-item computes a rectangle of pixels of all
# channels of the first, keeps it in private memory, and multiplies it with the weights of the second for all
# of its channels, a few vectors at a time. So the values in between never travel through memory, nothing is
# computed twice, and one launch replaces two.

_PIXEL_AXES = 3  # Axes of a result: rows, columns, the channels of a block
# Axes of the second: those of its result, blocks of channels, a window, the channels of a block.
_POINTWISE_AXES, _WINDOW = 9, slice(6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Separable:
    """The blocks of both convolutions; elementwise ones are inlined except those named here."""

    padded: BlockInfo | None
    depthwise: BlockInfo
    between: BlockInfo | None  # The operand of the second, where it differs from the result of the first
    pointwise: BlockInfo
    tail: BlockInfo | None


def separable(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Keep the first convolution's pixels for the second."""
    require(limits.groups_of_one)
    what = _both_of(schedule, most)
    loops = schedule.get_loops(what.pointwise.block)
    images, channels, rows, columns, lanes, blocked, down, across, inner = loops
    channels, beside, _ = sample_tile(schedule, channels, _MOST_BESIDE)
    rows, high, _ = sample_tile(schedule, rows, _MOST_VECTORS)
    columns, wide, _ = sample_tile(schedule, columns, _MOST_VECTORS)
    outer, steps, _ = sample_tile(schedule, inner, limits.unroll)
    groups, tile = [images, rows, columns], [high, wide, beside]
    schedule.reorder(*groups, channels, blocked, down, across, outer, steps, *tile, lanes)
    group = fuse(schedule, groups)
    schedule.bind(group, "blockIdx.x")
    tail = accumulate(schedule, [one for one in (what.pointwise, what.tail) if one is not None])
    schedule.reverse_compute_at(tail, channels, preserve_unit_loops=True)
    _unroll_then_vectorise(schedule, below(schedule, tail, channels))
    _unroll_then_vectorise(schedule, [steps, *tile, lanes])
    _keep(schedule, what, group)
    schedule.decompose_reduction(what.pointwise.block, blocked)


def _keep(schedule: Schedule, what: _Separable, group: LoopRV) -> None:
    """Compute the second convolution's operand for a rectangle before it, block by block of channels."""
    kept = what.between or what.depthwise
    compute_in(schedule, kept.block, group, "local")
    channels = below(schedule, kept.block, group)[1]
    if what.between is not None:
        compute_in(schedule, what.depthwise.block, channels, "local")
        _unroll_then_vectorise(schedule, below(schedule, kept.block, channels)[-_PIXEL_AXES:])
    *pixels, down, across = below(schedule, what.depthwise.block, channels)[-_PIXEL_AXES - 2 :]
    schedule.reorder(down, across, *pixels)
    _unroll_then_vectorise(schedule, [across, *pixels])
    if what.padded is not None:
        compute_in(schedule, what.padded.block, channels, "local")
        schedule.vectorize(schedule.get_loops(what.padded.block)[-1])
    schedule.decompose_reduction(what.depthwise.block, down)


def _unroll_then_vectorise(schedule: Schedule, loops: Sequence[LoopRV]) -> None:
    """Unroll, then vectorise: `write_out` in the other order, which recorded schedules have."""
    unroll(schedule, loops[:-1])
    schedule.vectorize(loops[-1])


def _both_of(schedule: Schedule, lanes: int) -> _Separable:
    """Return the two convolutions that a function computes; raise ValueError where it computes others."""
    found = [part_of(schedule, block) for block in blocks(schedule)]
    sums = [n for n, part in enumerate(found) if part.is_reduction]
    require(len(sums) == 2)
    first, second = sums
    before = [part for part in found[:first] if calls(schedule, part.block, CHOICES)]
    made = _Separable(
        padded=before[-1] if before else None,
        depthwise=found[first],
        between=found[second - 1] if second - 1 > first else None,
        pointwise=found[second],
        tail=found[-1] if second + 1 < len(found) else None,
    )
    extents = made.pointwise.extents
    require(len(extents) == _POINTWISE_AXES and extents[_WINDOW] == (1, 1) and extents[_AXES - 1] == lanes)
    kept = (made.padded, made.between, made.tail)
    for part in found:
        if not part.is_reduction and part not in kept:
            schedule.compute_inline(part.block)
    require(_is_depthwise(schedule, made.depthwise, lanes))
    require(not _is_depthwise(schedule, made.pointwise, lanes))
    return made
