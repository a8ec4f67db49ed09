"""Lays operands out: vectors of output channels, and images whose rows and columns are one axis."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx.analysis import undefined_vars

from .parts import (
    REDUCE,
    SPATIAL,
    BlockInfo,
    SketchLimits,
    bind_alone,
    fuse,
    is_elementwise,
    is_number,
    part_of,
    reads_along,
    step_along,
    unroll,
)


def pack(
    schedule: Schedule,
    main: SBlockRV,
    read: int,
    channel: int,
    lanes: int,
    maker: SBlockRV | None = None,
    *,
    beside: bool = False,
) -> SBlockRV:
    """Lay an operand out with `lanes` output channels innermost; return the block that does.

    `channel` is the axis of `main` that runs along them; raises ValueError where it is no dimension of the
    operand. `maker` is the block that makes the operand; where it is not None, a copy is made. With `beside`,
    the vectors for one term of the sum lie side by side, as work-items of a warp read them, else those of one
    work-item.
    """
    found: s_tir.SBlock = schedule.get(main)
    region = found.reads[read].region
    place = next((n for n, span in enumerate(region) if _is_axis(span.min, found.iter_vars, channel)), None)
    if place is None:
        raise ValueError("the output channels are no dimension of an operand")
    block = schedule.cache_read(main, read, "global") if maker is None else maker

    def order(*at: ir.Var) -> list[ir.Expr]:
        others = [index for n, index in enumerate(at) if n != place]
        vectors = [*others, at[place] // lanes] if beside else [at[place] // lanes, *others]
        return [*vectors, at[place] % lanes]

    schedule.transform_layout(block, ("write", 0), order)
    loops = schedule.get_loops(block)
    schedule.reorder(loops[place], *(loop for n, loop in enumerate(loops) if n != place))
    return block


def _is_axis(index: ir.Expr, axes: Sequence[tirx.IterVar], number: int) -> bool:
    """Return whether an index is an axis, perhaps added to others that have one step only."""
    linear = sym.detect_linear_equation(index, [axes[number].var])
    if not linear or not is_number(linear[0], 1):
        return False
    single = [axis.var for axis in axes if is_number(axis.dom.extent, 1)]
    rest = undefined_vars(linear[1], [])
    alone = bool(rest) or is_number(linear[1], 0)
    return alone and all(any(var.same_as(one) for one in single) for var in rest)


def channels_last(schedule: Schedule, part: BlockInfo, channel: int, lanes: int) -> None:
    """Store the output of a block with `lanes` channels innermost.

    Raises ValueError where it is not written along the block's spatial axes.
    """
    if len(schedule.get(part.block).writes[0].source.shape) != len(part.spatial):
        raise ValueError("the result has other axes than the block")

    def order(*at: ir.Var) -> list[ir.Expr]:
        before, after = at[:channel], at[channel + 1 :]
        return [*before, at[channel] // lanes, *after, at[channel] % lanes]

    schedule.transform_layout(part.block, ("write", 0), order)


def launch_rows(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    """Launch the block of `pack` separately: a processor's work-item has a row of vectors, or a panel."""
    outputs, *others = schedule.get_loops(block)
    outputs, last = schedule.split(outputs, [None, lanes])
    schedule.reorder(outputs, *others, last)
    schedule.bind(fuse(schedule, [outputs, *others[:-1]]), "blockIdx.x")


def launch_packing(schedule: Schedule, block: SBlockRV, lanes: int, limits: SketchLimits) -> None:
    """Launch the block of `pack` separately, one work-item for a vector and a window of an input channel."""
    outputs, inputs, *window = schedule.get_loops(block)
    outputs, vector = schedule.split(outputs, [None, lanes])
    schedule.reorder(outputs, inputs, *window, vector)
    bind_alone(schedule, fuse(schedule, [outputs, inputs]), limits)
    unroll(schedule, window)
    schedule.vectorize(vector)


# Rows of 14 pixels have no vectors of four, but an image of 14 x 14 has; and a tile of flat pixels need not
# end where a row does.

_AXES = (SPATIAL,) * 4 + (REDUCE,) * 3  # Axes of a convolution: batch, channels, rows, columns; the sum's
PIXELS = 2  # The axis of a flat convolution: batch, channels, pixels; input channels


def flatten(
    schedule: Schedule, before: Sequence[BlockInfo], rest: Sequence[BlockInfo]
) -> list[BlockInfo] | None:
    """Return the rest of a contraction with flat images: the first three axes spatial, the last reduced.

    Return None, with the schedule unchanged, where the function is no convolution or has a window or strides,
    or where something is computed `before` it.
    """
    main = rest[0]
    extents = main.extents
    if before or main.kinds != _AXES or extents[5:] != (1, 1) or 1 in extents[2:4]:
        return None
    shape = extents[2:4]
    images = reads_along(schedule, main.block, 3)
    if len(images) != 1 or step_along(schedule, main.block, images[0], 3) != 1:
        return None
    image = schedule.get(main.block).reads[images[0]].source
    if _rows_and_columns(image) != shape or not all(is_elementwise(tail, main) for tail in rest[1:]):
        return None
    for part in rest:
        for kind in ("read", "write"):
            _flatten_images(schedule, part, kind, shape)
    columns = shape[1]
    schedule.transform_block_layout(main.block, lambda n, k, h, w, c, y, x: [n, k, h * columns + w, c])
    for tail in rest[1:]:
        schedule.transform_block_layout(tail.block, lambda n, k, h, w: [n, k, h * columns + w])
    return [part_of(schedule, part.block) for part in rest]


def _rows_and_columns(image: tirx.Buffer) -> tuple[int, ...]:
    """Return the extents of the last two of four dimensions; none for other numbers of dimensions."""
    return tuple(int(extent) for extent in image.shape[2:]) if len(image.shape) == len("nchw") else ()


def _flatten_images(schedule: Schedule, part: BlockInfo, kind: str, shape: tuple[int, ...]) -> None:
    """Make one dimension of the rows and columns of each image that a block reads or writes."""

    def flat(n: ir.Expr, c: ir.Expr, h: ir.Expr, w: ir.Expr) -> list[ir.Expr]:
        return [n, c, h * shape[1] + w]

    found = schedule.get(part.block)
    for number, region in enumerate(found.reads if kind == "read" else found.writes):
        if _rows_and_columns(region.source) == shape:
            schedule.transform_layout(part.block, (kind, number), flat)
