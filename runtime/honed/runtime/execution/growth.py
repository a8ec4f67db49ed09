"""Describes decoder state that grows from run to run."""

from __future__ import annotations

from typing import Final, NamedTuple

# Extra input of a compiled decoder, [1, room]: a mask of the rows of its state that are in use.
ROWS_MASK: Final = "honed.rows_mask"


class Growth(NamedTuple):
    """State that grows along an axis: the input with its present rows, and the output with new rows.

    New rows are last in the output; if it is as long as the input, they follow the present rows, perhaps in
    the input's own buffer, so that nothing is copied.
    """

    input: str
    output: str
    axis: int
