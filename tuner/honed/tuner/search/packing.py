"""Layouts in which the output channels of a vector lie side by side: of weights, and of what a block writes."""

from __future__ import annotations

from tvm import ir
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from .blocks import SPATIAL, BlockInfo


def pack_weights(schedule: Schedule, main: SBlockRV, read: int, channel: int, lanes: int) -> SBlockRV:
    """Copy the weights so that `lanes` output channels are innermost; returns the block that copies.

    `channel` is the axis of `main` that runs along them; raises ValueError where it is no dimension of theirs.
    """
    region = schedule.get(main).reads[read].region
    axis = schedule.get(main).iter_vars[channel].var
    place = next((n for n, span in enumerate(region) if span.min.same_as(axis)), None)
    if place is None:
        raise ValueError("the output channels are no dimension of the weights")
    copy = schedule.cache_read(main, read, "global")

    def pack(*at: ir.Var) -> list[ir.Expr]:
        others = [index for n, index in enumerate(at) if n != place]
        return [at[place] // lanes, *others, at[place] % lanes]

    schedule.transform_layout(copy, ("write", 0), pack)
    loops = schedule.get_loops(copy)
    schedule.reorder(loops[place], *(loop for n, loop in enumerate(loops) if n != place))
    return copy


def channels_last(schedule: Schedule, block: SBlockRV, what: BlockInfo, channel: int, lanes: int) -> None:
    """Keep what a block writes with `lanes` channels innermost.

    Raises ValueError where it is not written along the block's spatial axes.
    """
    axes = sum(kind == SPATIAL for kind in what.kinds)
    if len(schedule.get(block).writes[0].source.shape) != axes:
        raise ValueError("the result has other axes than the block")

    def order(*at: ir.Var) -> list[ir.Expr]:
        before, after = at[:channel], at[channel + 1 :]
        return [*before, at[channel] // lanes, *after, at[channel] % lanes]

    schedule.transform_layout(block, ("write", 0), order)
