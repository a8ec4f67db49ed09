"""Sketches for devices without local memory worth copying into: registers, vectors and rows.

A sketch schedules a whole function and leaves numbers open (tile sizes, lanes, unrolling): they are sampled,
so that the search can change them. Four shapes of work cover what models are made of:

- tile: one work-item computes a tile of the output in registers, vectorised along one axis of it (dense,
  batched matmul, convolution, pooling);
- rows and columns: one work-item computes whole rows or columns, with every reduction along them (softmax,
  normalisation, reductions);
- stream: one work-item moves a few vectors (elementwise chains, transposes, concatenation);
- whole: a reduction to a single element, in parts and then all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from tvm import s_tir, tirx
from tvm.s_tir import Schedule

from .attention import attention
from .attention_groups import attention_groups
from .blocked import blocked
from .blocked_groups import blocked_groups
from .blocks import SPATIAL, Keep, inline_elementwise
from .channels import channels
from .grouped import GroupTile, grouped
from .held import held
from .packed import packed
from .panels import panels
from .parts import SketchLimits, alone, bind_alone, fuse, lane_choices, lanes_of, parts
from .points import points
from .pointwise import pointwise
from .rows import columns, columns_again, rows, rows_again
from .separable import separable
from .sliced import SLICES, sliced
from .tile import tile, tile_across, tile_padded
from .traces import as_module, steps, unscheduled
from .windowed import windowed

_MOST_STEPS = 32  # vectors that one work-item moves
_MOST_PARTS = 256  # of a reduction to a single element
_ATTEMPTS = 2  # with other numbers: TVM simplifies some indices so that a later step does not know the block

Sketch = Callable[[Schedule, SketchLimits, int], bool]


def _all() -> tuple[Sketch, ...]:
    return (
        held,
        packed,
        pointwise,
        windowed,
        blocked,
        blocked_groups,
        channels,
        panels,
        tile,
        tile_across,
        tile_padded,
        rows,
        rows_again,
        columns,
        columns_again,
        lines,
        stream,
        whole,
    )


def sketches(func: tirx.PrimFunc, limits: SketchLimits) -> list[Schedule]:
    """Every sketch that fits a function; none where it has blocks that the sketches do not understand."""
    tries = [
        lambda schedule, make=make, lanes=lanes: make(schedule, limits, lanes)
        for make in _all()
        for lanes in lane_choices(func, limits)
    ]
    return _fitting(func, tries)


def point_sketches(func: tirx.PrimFunc, limits: SketchLimits) -> list[Schedule]:
    """The sketch of a function that transforms tiles: others write all of its sums out for each element."""
    return _fitting(func, [partial(points, limits=limits)])


def grouped_sketches(func: tirx.PrimFunc, by: GroupTile, limits: SketchLimits) -> list[Schedule]:
    """The grouped sketches with and without vectors; none where the function is no contraction.

    Where operands are copied, with and without loads ahead; of few outputs the sliced one, too.
    """
    lanes = lane_choices(func, limits)
    tries = [
        partial(grouped, by=by, limits=limits, most=n, ahead=ahead)
        for n in (*lanes, 1)
        for ahead in ((True, False) if by.shared else (False,))
    ]
    if math.prod(int(extent) for extent in func.params[-1].shape) <= by.sliced:
        tries += [partial(sliced, by=by, limits=limits, most=lanes[0], slices=n) for n in SLICES]
    return _fitting(func, tries)


def attention_sketches(func: tirx.PrimFunc, by: GroupTile | None, limits: SketchLimits) -> list[Schedule]:
    """The sketches of an attention; none where the function is no attention, or one that does not fit.

    Groups share rows where local memory pays. First they copy what they multiply there: on an H100
    LightGlue's attentions take 16 us so, and 26 read where they lie.
    """
    lanes = lane_choices(func, limits)
    tries: list[Callable[[Schedule], bool]] = [partial(attention, limits=limits, most=n) for n in lanes]
    if by is not None and by.shared:
        tries += [
            partial(attention_groups, by=by, limits=limits, most=lanes[0], copied=copied)
            for copied in (True, False)
        ]
    return _different(unscheduled(as_module(func)), tries)


def separable_sketches(func: tirx.PrimFunc, limits: SketchLimits) -> list[Schedule]:
    """The sketch of two convolutions in one function; none where the function is something else."""
    tries = [partial(separable, limits=limits, most=n) for n in lane_choices(func, limits)]
    return _different(unscheduled(as_module(func)), tries)


def _fitting(func: tirx.PrimFunc, tries: Iterable[Callable[[Schedule], bool]]) -> list[Schedule]:
    """What the tries that fit make of a function with its elementwise blocks inlined."""
    inlined = unscheduled(as_module(func))
    inline_elementwise(inlined, Keep.PADDING)  # as every sketch does first, or goes on from there
    return _different(inlined, tries)


def _different(begun: Schedule, tries: Iterable[Callable[[Schedule], bool]]) -> list[Schedule]:
    """What the tries that fit make of a schedule, without those that do the same as an earlier one."""
    found: dict[str, Schedule] = {}
    for make in tries:
        for _ in range(_ATTEMPTS):
            schedule = begun.copy()
            try:
                if make(schedule):
                    found.setdefault(steps(schedule.trace), schedule)
                break
            except s_tir.ScheduleError:
                continue  # the function does not have the sketch's form after all, or not with these numbers
            except ValueError:
                break  # it does not have the form
    return list(found.values())


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
        factors = schedule.sample_perfect_tile(rest, n=2, max_innermost_factor=_MOST_STEPS)
        outer, steps = schedule.split(rest, factors)
        bind_alone(schedule, outer, limits)
        schedule.vectorize(vector)
        schedule.annotate(steps, "pragma_auto_unroll_max_step", 16)
    return True


def lines(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """A work-group of a processor moves lines of blocks of channels. False where there are none."""
    found = parts(schedule)
    if not limits.groups_of_one or any(p.info.is_reduction or p.info.extents[-1:] != (most,) for p in found):
        return False
    for part in found:
        alone(schedule, part, limits, most)
    return True


def whole(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Reduce everything to one element: work-items make parts of it, and one adds them up."""
    found = parts(schedule)
    if len(found) != 1 or SPATIAL in found[0].info.kinds:
        return False
    block = found[0].block
    loop = fuse(schedule, schedule.get_loops(block))
    factors = schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=_MOST_PARTS)
    _, inner = schedule.split(loop, factors)
    made = schedule.rfactor(inner, factor_axis=0)
    bind_alone(schedule, schedule.get_loops(made)[0], limits)
    schedule.decompose_reduction(made, schedule.get_loops(made)[-1])
    one = schedule.add_unit_loop(schedule.get_loops(block)[0])
    schedule.bind(one, "threadIdx.x" if limits.threads != (1,) else "blockIdx.x")
    return True
