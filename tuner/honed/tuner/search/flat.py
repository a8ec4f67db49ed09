"""Images whose rows and columns are one axis: convolutions without a window as products of matrices.

Rows of 14 pixels have no vectors of four, but an image of 14 x 14 has; and a tile of flat pixels need not end
where a row does.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx
from tvm.s_tir import Schedule

from .blocks import REDUCE, SPATIAL, reads_along, step_along
from .parts import BlockPart, is_elementwise, part_of

_AXES = (SPATIAL,) * 4 + (REDUCE,) * 3  # of a convolution: batch, channels, rows, columns; the sum's
PIXELS = 2  # the axis of a flat convolution: batch, channels, pixels; input channels


def flatten(
    schedule: Schedule, before: Sequence[BlockPart], rest: Sequence[BlockPart]
) -> list[BlockPart] | None:
    """The rest of a contraction with flat images, its first three axes spatial, the last the sum's.

    None, and nothing done, where it is no convolution or has a window or steps, or something is computed
    `before` it.
    """
    main = rest[0]
    extents = main.info.extents
    if before or main.info.kinds != _AXES or extents[5:] != (1, 1) or 1 in extents[2:4]:
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
    """Extents of the last two of four dimensions; none of other numbers of dimensions."""
    return tuple(int(extent) for extent in image.shape[2:]) if len(image.shape) == len("nchw") else ()


def _flatten_images(schedule: Schedule, part: BlockPart, kind: str, shape: tuple[int, ...]) -> None:
    """Make one dimension of the rows and columns of each image that a block reads or writes."""

    def flat(n: ir.Expr, c: ir.Expr, h: ir.Expr, w: ir.Expr) -> list[ir.Expr]:
        return [n, c, h * shape[1] + w]

    found = schedule.get(part.block)
    for number, region in enumerate(found.reads if kind == "read" else found.writes):
        if _rows_and_columns(region.source) == shape:
            schedule.transform_layout(part.block, (kind, number), flat)
