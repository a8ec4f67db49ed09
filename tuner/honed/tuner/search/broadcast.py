"""The broadcast sketch: convolutions with output channels along the lanes, every pixel broadcast to them.

For processors. A launch before lays the weights out with as many output channels innermost as a vector has
lanes, another pads the image. A work-item then computes a rectangle of pixels for a few vectors of channels:
each vector of weights is loaded once and multiplied with all pixels of the rectangle, which the processor
broadcasts from memory as it multiplies. The elementwise tail runs in the same lanes, before they are taken
apart to be written row by row; so extents that no vector divides cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from .blocks import REDUCE, SPATIAL, Keep, reads_along
from .packing import channels_last, pack_weights
from .parts import (
    Part,
    SketchLimits,
    alone,
    below,
    contraction,
    fuse,
    is_elementwise,
    lanes_of,
    sample_tile,
    set_private,
)

_MOST_VECTORS = 28  # of accumulators: of 32 registers, the others hold weights and pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """What is convolved, by the numbers of its axes."""

    main: Part
    weights: int  # of its reads
    channel: int
    pixels: list[int]
    lanes: int


@dataclass(frozen=True, slots=True)
class _Loops:
    """The loops of a convolution by level."""

    groups: list[LoopRV]
    job: LoopRV  # rectangles that one work-item computes one after another
    outside: list[LoopRV]  # of the reduction
    inside: list[LoopRV]  # of the reduction, written out
    tile: list[LoopRV]
    lanes: LoopRV


def broadcast(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile a convolution with its channels along the lanes. False where the function is none."""
    if limits.threads != (1,):
        return False
    found = contraction(schedule, Keep.PADDING)
    what = _understood(schedule, found[1][0], most) if found is not None else None
    if found is None or what is None:
        return False
    before, rest = found
    packed = pack_weights(schedule, what.main.block, what.weights, what.channel, what.lanes)
    loops = _split(schedule, what)
    main = what.main.block
    schedule.reorder(*loops.groups, loops.job, *loops.outside, *loops.inside, *loops.tile, loops.lanes)
    schedule.bind(fuse(schedule, loops.groups), "blockIdx.x")
    together = len(rest) == 2 and is_elementwise(rest[1], rest[0])
    if together:
        set_private(schedule, main)
    result = schedule.cache_write(rest[1].block if together else main, 0, "local")
    channels_last(schedule, main, what.main.info, what.channel, what.lanes)
    if together:
        tail = rest[1].block
        channels_last(schedule, tail, rest[1].info, what.channel, what.lanes)
        schedule.reverse_compute_at(tail, loops.job, preserve_unit_loops=True)
        _in_lanes(schedule, tail, loops.job, what)
    schedule.reverse_compute_at(result, loops.job, preserve_unit_loops=True)
    for loop in below(schedule, result, loops.job):
        schedule.unroll(loop)
    schedule.vectorize(loops.lanes)
    for loop in (*loops.inside, *loops.tile):
        schedule.unroll(loop)
    schedule.decompose_reduction(main, loops.outside[0])
    _launch_weights(schedule, packed, what.lanes)
    for part in before:
        alone(schedule, part, limits, most)
    if len(rest) == 2 and not together:
        alone(schedule, rest[1], limits, most)
    return True


def _understood(schedule: Schedule, main: Part, most: int) -> _Convolution | None:
    """The convolution; None where the function is none, or its channels fill no vector."""
    spatial = [n for n, kind in enumerate(main.info.kinds) if kind == SPATIAL]
    if len(spatial) < 3 or len(schedule.get(main.block).reads) != 2:
        return None
    images = reads_along(schedule, main.block, spatial[-1])
    if len(images) != 1:
        return None
    weights = 1 - images[0]
    channels = [n for n in spatial[:-1] if reads_along(schedule, main.block, n) == [weights]]
    if len(channels) != 1:
        return None
    lanes = lanes_of(main.info.extents[channels[0]], most)
    if lanes == 1:
        return None
    return _Convolution(
        main=main,
        weights=weights,
        channel=channels[0],
        pixels=[n for n in spatial if n > channels[0]],
        lanes=lanes,
    )


def _split(schedule: Schedule, what: _Convolution) -> _Loops:
    """Split the axes; how large the rectangle is, and how many follow each other, is left open."""
    loops = list(schedule.get_loops(what.main.block))
    reduced = [loops[n] for n, kind in enumerate(what.main.info.kinds) if kind == REDUCE]
    images = [loops[n] for n in range(what.channel)]
    vectors, lanes = schedule.split(loops[what.channel], [None, what.lanes])
    channels, beside, _ = sample_tile(schedule, vectors, 2)
    outer, tile = list[LoopRV](), list[LoopRV]()
    for n in what.pixels:
        places, steps, _ = sample_tile(schedule, loops[n], _MOST_VECTORS)
        outer.append(places)
        tile.append(steps)
    places, job, _ = sample_tile(schedule, outer[-1], 16)
    *outside, last = reduced
    return _Loops(
        groups=[*images, *outer[:-1], channels, places],
        job=job,
        outside=outside,
        inside=[last],
        tile=[beside, *tile],
        lanes=lanes,
    )


def _in_lanes(schedule: Schedule, tail: SBlockRV, under: LoopRV, what: _Convolution) -> None:
    """Run the tail with the channels of a vector innermost."""
    loops = below(schedule, tail, under)
    channel = loops[len(loops) - 1 - len(what.pixels)]
    vectors, lanes = schedule.split(channel, [None, what.lanes])
    others = [loop for loop in loops if loop is not channel]
    before = others[: len(others) - len(what.pixels)]
    after = others[len(others) - len(what.pixels) :]
    schedule.reorder(*before, vectors, *after, lanes)
    schedule.vectorize(lanes)
    for loop in (*before, vectors, *after):
        schedule.unroll(loop)


def _launch_weights(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    """A launch of its own, in which a work-item packs a vector's channels."""
    outputs, *others = schedule.get_loops(block)
    outputs, last = schedule.split(outputs, [None, lanes])
    schedule.reorder(outputs, *others, last)
    schedule.bind(outputs, "blockIdx.x")
