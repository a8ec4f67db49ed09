"""State that grows from run to run."""

from __future__ import annotations

from typing import Final, NamedTuple

# In the shapes of a decoder's form, [1, room]: an input that tells which rows of its state are there.
ROWS_MASK: Final = "honed.rows_mask"


class Growth(NamedTuple):
    """Values that grow along an axis: the input that has those so far, and the output with new ones.

    New ones are last in the output, or where it is as long as the input, behind those so far: perhaps in the
    same buffer, to which then nothing is copied.
    """

    input: str
    output: str
    axis: int
