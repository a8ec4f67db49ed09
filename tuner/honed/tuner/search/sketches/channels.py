"""The channels sketch: convolutions with their output channels along the lanes.

For processors. Launches before lay the weights out with as many output channels innermost as a vector has
lanes, and pad the image. A work-item then computes a rectangle of pixels for a few vectors of channels. Each
vector of weights is loaded once for all pixels of the rectangle, which the processor broadcasts from memory
as it multiplies; of a depthwise convolution the image is laid out like the weights, and so are its pixels
vectors. The elementwise tail runs in the same lanes, before they are taken apart to be written row by row. So
neither odd extents nor strides cost anything. Where there is no window, and vectors divide the rows, `tile`
has nothing to lay out or to take apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.tuner.search.packing import channels_last, launch_rows, pack
from honed.tuner.search.parts import (
    BlockPart,
    Keep,
    SketchLimits,
    TileLoops,
    below,
    contraction,
    fuse,
    is_elementwise,
    lanes_of,
    launch_others,
    maker,
    reads_along,
    sample_tile,
    set_private,
    sketch,
    write_out,
)

_BYTES = 4  # of an element; processors compute halves in singles
_MOST_VECTORS = 28  # of accumulators: of 32 registers, the others hold weights and pixels
_LEAST_REDUCED = 2  # axes: a window's, be it of one pixel, and channels; products have one
_MOST_BESIDE = 2  # vectors of channels that share the pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """What is convolved, by the numbers of its reads and axes."""

    main: BlockPart
    image: int
    weights: int
    depthwise: bool
    channel: int
    pixels: list[int]
    lanes: int


@sketch(60)
def channels(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile a convolution with its channels along the lanes. False where the function is none."""
    found = contraction(schedule, Keep.PADDING) if limits.groups_of_one else None
    what = _understood(schedule, found[1][0], limits, most) if found is not None else None
    if found is None or what is None:
        return False
    before, rest = found
    main = what.main.block
    laid_out = [pack(schedule, main, what.weights, what.channel, what.lanes)]
    if what.depthwise:
        image = maker(schedule, main, what.image, before)
        made = image.block if image else None
        laid_out.append(pack(schedule, main, what.image, what.channel, what.lanes, made))
    loops = _split(schedule, what)
    schedule.reorder(*loops.in_order)
    group = fuse(schedule, loops.groups)
    schedule.bind(group, "blockIdx.x")
    _write(schedule, what, rest, group)
    write_out(schedule, loops.written)
    schedule.decompose_reduction(main, loops.outside[0])
    for block in laid_out:
        launch_rows(schedule, block, what.lanes)
    launch_others(schedule, [p for p in before if p.block not in laid_out], rest, limits, most)
    return True


def _understood(schedule: Schedule, main: BlockPart, limits: SketchLimits, most: int) -> _Convolution | None:
    """The convolution; None where the function is none, its channels fill no vector, or `tile` is better."""
    spatial = main.spatial
    if len(spatial) < 3 or len(schedule.get(main.block).reads) != 2:
        return None
    images = reads_along(schedule, main.block, spatial[-1])
    if len(images) != 1:
        return None
    weights = 1 - images[0]
    read = {n: reads_along(schedule, main.block, n) for n in spatial[:-1]}
    channel = next((n for n, reads in read.items() if weights in reads), None)
    if channel is None:
        return None
    lanes = lanes_of(main.extents[channel], most)
    depthwise = len(read[channel]) == 2
    reduced = [main.extents[n] for n in main.reducing]
    if (
        len(reduced) < _LEAST_REDUCED
        or lanes == 1
        or (
            not depthwise
            and math.prod(reduced[1:]) == 1
            and main.extents[spatial[-1]] % (limits.vector_bytes // _BYTES) == 0
        )
    ):
        return None
    return _Convolution(
        main=main,
        image=images[0],
        weights=weights,
        depthwise=depthwise,
        channel=channel,
        pixels=[n for n in spatial if n > channel],
        lanes=lanes,
    )


def _split(schedule: Schedule, what: _Convolution) -> TileLoops:
    """Split the axes; how large the rectangle is, is left open."""
    loops = list(schedule.get_loops(what.main.block))
    reduced = [loops[n] for n in what.main.reducing]
    vectors, lanes = schedule.split(loops[what.channel], [None, what.lanes])
    vectors, beside, _ = sample_tile(schedule, vectors, _MOST_BESIDE)
    outer, tile = list[LoopRV](), list[LoopRV]()
    for n in what.pixels:
        places, steps, _ = sample_tile(schedule, loops[n], _MOST_VECTORS)
        outer.append(places)
        tile.append(steps)
    return TileLoops(
        groups=[*loops[: what.channel], *outer[:-1], vectors, outer[-1]],
        outside=reduced[:-1],
        inside=reduced[-1:],
        tile=[beside, *tile],
        lanes=lanes,
    )


def _write(schedule: Schedule, what: _Convolution, rest: list[BlockPart], under: LoopRV) -> None:
    """Run the tail in lanes, if there is one, then take them apart."""
    main = what.main
    tail = rest[1] if len(rest) == 2 and is_elementwise(rest[1], main) else None
    if tail is None:
        result = schedule.cache_write(main.block, 0, "local")
        channels_last(schedule, main, what.channel, what.lanes)
    else:
        set_private(schedule, main.block)
        result = schedule.cache_write(tail.block, 0, "local")
        for part in (main, tail):
            channels_last(schedule, part, what.channel, what.lanes)
        schedule.reverse_compute_at(tail.block, under, preserve_unit_loops=True)
        _in_lanes(schedule, tail.block, under, what)
    schedule.reverse_compute_at(result, under, preserve_unit_loops=True)
    for loop in below(schedule, result, under):
        schedule.unroll(loop)


def _in_lanes(schedule: Schedule, tail: SBlockRV, under: LoopRV, what: _Convolution) -> None:
    """Run the tail with the channels of a vector innermost."""
    loops = below(schedule, tail, under)
    channel = loops[len(loops) - 1 - len(what.pixels)]
    vectors, lanes = schedule.split(channel, [None, what.lanes])
    others = [loop if loop is not channel else vectors for loop in loops]
    schedule.reorder(*others, lanes)
    write_out(schedule, [*others, lanes])
