"""Sketches for devices without local memory worth copying into: registers, vectors and rows.

A sketch schedules a whole function and leaves numbers open (tile sizes, lanes, unrolling): they are sampled,
so that the search can change them. Four shapes of work cover what models are made of:

- tile: one work-item computes a tile of the output in registers, vectorised along one axis of it (dense,
  batched matmul, convolution, pooling);
- rows and columns: one work-item computes whole rows or columns, with every reduction along them (softmax,
  normalisation, reductions);
- stream: one work-item moves a few vectors (elementwise chains, transposes, concatenation);
- whole: a reduction to a single element, in parts and then all of them.

Each is a function that `@sketch` (`search/parts.py`) stands over, in whatever file of this folder. Those that
are called by name here are for functions of one form alone.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable
from functools import partial

from tvm import s_tir, tirx
from tvm.s_tir import Schedule

from honed.tuner.search.parts import SKETCHES, Keep, SketchLimits, inline_elementwise, lane_choices
from honed.tuner.search.traces import as_module, steps, unscheduled

from .attention import attention, attention_groups
from .grouped import SLICES, GroupTile, grouped, sliced
from .points import points
from .separable import separable

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_found.name)

_ATTEMPTS = 2  # with other numbers: TVM simplifies some indices so that a later step does not know the block


def sketches(func: tirx.PrimFunc, limits: SketchLimits) -> list[Schedule]:
    """Every sketch that fits a function; none where it has blocks that the sketches do not understand."""
    tries = [
        lambda schedule, make=make, lanes=lanes: make(schedule, limits, lanes)
        for _, make in sorted(SKETCHES.items())
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
