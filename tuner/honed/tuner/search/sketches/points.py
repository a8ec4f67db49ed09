"""The points sketch: a work-item transforms whole tiles, for Winograd's convolutions (`lower.winograd`).

All points of a tile are made of the same pixels, and all pixels of the same points: each is loaded once.
"""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.tuner.lower.functions.winograd import IMAGE, POINTS, STEP
from honed.tuner.search.parts import SketchLimits, bind, by_single_items, parts


def points(schedule: Schedule, limits: SketchLimits) -> bool:
    """Give each work-item a channel's tile. False where the function transforms none."""
    found = parts(schedule) if by_single_items(limits) else []
    if len(found) != 1 or found[0].is_reduction:
        return False
    block = found[0].block
    loops = list(schedule.get_loops(block))
    if found[0].name == IMAGE:
        outer, inner = loops[1:], loops[:1]
    elif _reads_points(schedule, block):
        outer, inner = loops[:-2], list[LoopRV]()
        for loop in loops[-2:]:
            tiles, pixels = schedule.split(loop, [None, STEP])
            outer.append(tiles)
            inner.append(pixels)
    else:
        return False
    schedule.reorder(*outer, *inner)
    bind(schedule, outer, limits)
    for loop in inner:
        schedule.unroll(loop)
    return True


def _reads_points(schedule: Schedule, block: SBlockRV) -> bool:
    """Whether the block reads all points of tiles for each of its pixels."""
    found = schedule.get(block)
    images = len(found.writes[0].source.shape) == len("nchw")
    firsts = [read.region[0].extent for read in found.reads if read.region]  # a scalar has no axis
    return images and any(isinstance(each, tirx.IntImm) and int(each) == POINTS for each in firsts)
