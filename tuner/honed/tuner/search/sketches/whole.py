"""The sketch of a reduction to a single element: in parts, and then all of them."""

from __future__ import annotations

from tvm.s_tir import Schedule

from honed.tuner.search.blocks import SPATIAL
from honed.tuner.search.parts import SketchLimits, bind_alone, fuse, parts, sample_tile, sketch

_MOST_PARTS = 256


@sketch(170)
def whole(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Reduce everything to one element: work-items make parts of it, and one adds them up."""
    found = parts(schedule)
    if len(found) != 1 or SPATIAL in found[0].info.kinds:
        return False
    block = found[0].block
    loop = fuse(schedule, schedule.get_loops(block))
    _, inner, _ = sample_tile(schedule, loop, _MOST_PARTS)
    made = schedule.rfactor(inner, factor_axis=0)
    bind_alone(schedule, schedule.get_loops(made)[0], limits)
    schedule.decompose_reduction(made, schedule.get_loops(made)[-1])
    one = schedule.add_unit_loop(schedule.get_loops(block)[0])
    schedule.bind(one, "threadIdx.x" if limits.threads != (1,) else "blockIdx.x")
    return True
