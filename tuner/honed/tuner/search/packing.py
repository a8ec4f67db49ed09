"""Layouts in which the output channels of a vector lie side by side: of operands and of results."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx.analysis import undefined_vars

from .blocks import BlockInfo, is_number
from .parts import SketchLimits, bind_alone, fuse


def pack(
    schedule: Schedule, main: SBlockRV, read: int, channel: int, lanes: int, made: SBlockRV | None = None
) -> SBlockRV:
    """Lay an operand out with `lanes` output channels innermost; returns the block that does.

    `channel` is the axis of `main` that runs along them; raises ValueError where it is no dimension of what
    is read. `made` is the block that makes the operand; where it is given, a copy is made.
    """
    found: s_tir.SBlock = schedule.get(main)
    region = found.reads[read].region
    place = next((n for n, span in enumerate(region) if _is_axis(span.min, found.iter_vars, channel)), None)
    if place is None:
        raise ValueError("the output channels are no dimension of an operand")
    block = schedule.cache_read(main, read, "global") if made is None else made

    def order(*at: ir.Var) -> list[ir.Expr]:
        others = [index for n, index in enumerate(at) if n != place]
        return [at[place] // lanes, *others, at[place] % lanes]

    schedule.transform_layout(block, ("write", 0), order)
    loops = schedule.get_loops(block)
    schedule.reorder(loops[place], *(loop for n, loop in enumerate(loops) if n != place))
    return block


def _is_axis(index: ir.Expr, axes: Sequence[tirx.IterVar], number: int) -> bool:
    """Whether an index is an axis, and perhaps others that have one step only."""
    linear = sym.detect_linear_equation(index, [axes[number].var])
    if not linear or not is_number(linear[0], 1):
        return False
    single = [axis.var for axis in axes if is_number(axis.dom.extent, 1)]
    rest = undefined_vars(linear[1], [])
    alone = bool(rest) or is_number(linear[1], 0)
    return alone and all(any(var.same_as(one) for one in single) for var in rest)


def channels_last(schedule: Schedule, block: SBlockRV, what: BlockInfo, channel: int, lanes: int) -> None:
    """Keep what a block writes with `lanes` channels innermost.

    Raises ValueError where it is not written along the block's spatial axes.
    """
    if len(schedule.get(block).writes[0].source.shape) != len(what.spatial):
        raise ValueError("the result has other axes than the block")

    def order(*at: ir.Var) -> list[ir.Expr]:
        before, after = at[:channel], at[channel + 1 :]
        return [*before, at[channel] // lanes, *after, at[channel] % lanes]

    schedule.transform_layout(block, ("write", 0), order)


def launch_rows(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    """Launch what `pack` made by itself, a work-item of a processor for a row of vectors, or a panel."""
    outputs, *others = schedule.get_loops(block)
    outputs, last = schedule.split(outputs, [None, lanes])
    schedule.reorder(outputs, *others, last)
    schedule.bind(fuse(schedule, [outputs, *others[:-1]]), "blockIdx.x")


def launch_packing(schedule: Schedule, block: SBlockRV, lanes: int, limits: SketchLimits) -> None:
    """Launch what `pack` made by itself, a work-item for a vector and a window of an input channel."""
    outputs, inputs, *window = schedule.get_loops(block)
    outputs, vector = schedule.split(outputs, [None, lanes])
    schedule.reorder(outputs, inputs, *window, vector)
    bind_alone(schedule, fuse(schedule, [outputs, inputs]), limits)
    for loop in window:
        schedule.unroll(loop)
    schedule.vectorize(vector)
