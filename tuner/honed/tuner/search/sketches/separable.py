"""The separable sketch: a depthwise convolution and the pointwise one that reads it, in one kernel.

For processors, of tensors whose channels lie in blocks. A work-item computes a rectangle of pixels of all
channels of the first, keeps it in private memory, and multiplies it with the weights of the second for all of
its channels, a few vectors at a time. So what is between them never travels through memory, nothing is
computed twice, and two launches are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from honed.tuner.search.parts import (
    CHOICES,
    BlockPart,
    SketchLimits,
    accumulate,
    below,
    blocks,
    calls,
    fuse,
    part_of,
    sample_tile,
    set_private,
)

from .blocked import MOST_BESIDE, MOST_VECTORS, depthwise_of

_PIXEL_AXES = 3  # of a result: rows, columns, the channels of a block
# Of the second: those of its result, blocks of channels, a window, the channels of a block.
_POINTWISE_AXES, _WINDOW = 9, slice(6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Separable:
    """The blocks of both convolutions; elementwise ones are inlined but for those named here."""

    padded: BlockPart | None
    depthwise: BlockPart
    between: BlockPart | None  # what the second reads, where that is made of the first
    pointwise: BlockPart
    tail: BlockPart | None


def separable(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Keep the first convolution's pixels for the second. False where the function is none of both."""
    what = _understood(schedule, most) if limits.groups_of_one else None
    if what is None:
        return False
    loops = schedule.get_loops(what.pointwise.block)
    images, channels, rows, columns, lanes, blocked, down, across, inner = loops
    channels, beside, _ = sample_tile(schedule, channels, MOST_BESIDE)
    rows, high, _ = sample_tile(schedule, rows, MOST_VECTORS)
    columns, wide, _ = sample_tile(schedule, columns, MOST_VECTORS)
    outer, steps, _ = sample_tile(schedule, inner, limits.unroll)
    groups, tile = [images, rows, columns], [high, wide, beside]
    schedule.reorder(*groups, channels, blocked, down, across, outer, steps, *tile, lanes)
    group = fuse(schedule, groups)
    schedule.bind(group, "blockIdx.x")
    tail = accumulate(schedule, [one for one in (what.pointwise, what.tail) if one is not None])
    schedule.reverse_compute_at(tail, channels, preserve_unit_loops=True)
    _write_out(schedule, below(schedule, tail, channels))
    _write_out(schedule, [steps, *tile, lanes])
    _keep(schedule, what, group)
    schedule.decompose_reduction(what.pointwise.block, blocked)
    return True


def _keep(schedule: Schedule, what: _Separable, group: LoopRV) -> None:
    """Compute what the second convolution reads of a rectangle before it, block by block of channels."""
    kept = what.between or what.depthwise
    schedule.compute_at(kept.block, group, preserve_unit_loops=True)
    set_private(schedule, kept.block)
    channels = below(schedule, kept.block, group)[1]
    if what.between is not None:
        schedule.compute_at(what.depthwise.block, channels, preserve_unit_loops=True)
        set_private(schedule, what.depthwise.block)
        _write_out(schedule, below(schedule, kept.block, channels)[-_PIXEL_AXES:])
    *pixels, down, across = below(schedule, what.depthwise.block, channels)[-_PIXEL_AXES - 2 :]
    schedule.reorder(down, across, *pixels)
    _write_out(schedule, [across, *pixels])
    if what.padded is not None:
        schedule.compute_at(what.padded.block, channels, preserve_unit_loops=True)
        set_private(schedule, what.padded.block)
        schedule.vectorize(schedule.get_loops(what.padded.block)[-1])
    schedule.decompose_reduction(what.depthwise.block, down)


def _write_out(schedule: Schedule, loops: Sequence[LoopRV]) -> None:
    """Vectorise the last of the loops and unroll the others."""
    for loop in loops[:-1]:
        schedule.unroll(loop)
    schedule.vectorize(loops[-1])


def _understood(schedule: Schedule, lanes: int) -> _Separable | None:
    """The two convolutions that a function is; None where it is none. Raises ValueError likewise."""
    found = [part_of(schedule, block) for block in blocks(schedule)]
    sums = [n for n, part in enumerate(found) if part.is_reduction]
    if len(sums) != 2:
        return None
    first, second = sums
    before = [part for part in found[:first] if calls(schedule, part.block, CHOICES)]
    made = _Separable(
        padded=before[-1] if before else None,
        depthwise=found[first],
        between=found[second - 1] if second - 1 > first else None,
        pointwise=found[second],
        tail=found[-1] if second + 1 < len(found) else None,
    )
    kept = (made.padded, made.between, made.tail)
    for part in found:
        if not part.is_reduction and part not in kept:
            schedule.compute_inline(part.block)
    extents = made.pointwise.extents
    if len(extents) != _POINTWISE_AXES or extents[_WINDOW] != (1, 1):
        return None
    kinds = [depthwise_of(schedule, one, lanes) for one in (made.depthwise, made.pointwise)]
    return made if kinds == [True, False] else None
