"""Sketches of functions that reduce nothing: what moves elements, and computes each from few others."""

from __future__ import annotations

from tvm.s_tir import Schedule

from honed.tuner.search.parts import (
    SketchLimits,
    alone,
    bind_alone,
    fuse,
    lanes_of,
    parts,
    sample_tile,
    sketch,
)

_MOST_STEPS = 32  # vectors that one work-item moves


@sketch(160)
def stream(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """One work-item moves a few vectors. False where anything is reduced."""
    found = parts(schedule)
    if any(p.info.is_reduction for p in found):
        return False
    for part in found:
        loops = schedule.get_loops(part.block)
        if not loops:
            loops = [schedule.add_unit_loop(part.block)]
        lanes = lanes_of(part.info.extents[-1] if part.info.extents else 1, most)
        rest, vector = schedule.split(fuse(schedule, loops), [None, lanes])
        outer, steps, _ = sample_tile(schedule, rest, _MOST_STEPS)
        bind_alone(schedule, outer, limits)
        schedule.vectorize(vector)
        schedule.annotate(steps, "pragma_auto_unroll_max_step", 16)
    return True


@sketch(150)
def lines(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """A work-group of a processor moves lines of blocks of channels. False where there are none."""
    found = parts(schedule)
    if not limits.groups_of_one or any(p.info.is_reduction or p.info.extents[-1:] != (most,) for p in found):
        return False
    for part in found:
        alone(schedule, part, limits, most)
    return True
